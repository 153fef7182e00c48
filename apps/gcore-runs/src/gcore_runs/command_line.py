"""Shared parts of the apps' command lines: find a command, run it, and report errors in one line."""

import os
import select
import sys
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import tyro

from gcore_controller import RankError
from gcore_runs.errors import UserError
from gcore_runs.logs import describe_os_error, one_line, printable
from gcore_runs.settings.checks import Checked, NonNegative
from gcore_runs.settings.parsing import parse_arguments

if TYPE_CHECKING:
    from gcore_runs.loop.recorder import Display
    from gcore_runs.loop.supervisor import RunResult
    from gcore_runs.report.run import Kind

ConfigT = TypeVar("ConfigT")

Settings = Mapping[str, type]
"""The dataclass of each command's options, by the command's name."""

Command = Callable[[Sequence[str]], None]
"""Called with the arguments after its name."""

NOTHING_LEARNED = 3
"""Exit code of a completed run without any step that had a learning signal."""

_ENVIRONMENT = {
    # Idle OpenMP threads spin by default, which makes a step ten times as long on shared cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}
"""Variables that torch, transformers and diffusers read when they are imported."""

SHELLS = ("bash", "zsh")

EPILOG = """options:
  --version                 print the version
  --print-completion SHELL  print what completes commands and options in bash or zsh

exit codes:
  0    success
  1    an unexpected error, with a traceback
  2    wrong input, or a reward, engine or training process that failed; one message
  3    the run was completed, but no step had anything to learn from: all rewards alike, or none
  130  interrupted by Ctrl-C, SIGTERM or SIGUSR1; what was finished is saved
  141  the reader of the output, such as head, has gone
"""


@dataclass(frozen=True, kw_only=True)
class RunArgs:
    """Arguments of a command about a run.

    Example:
        >>> @dataclass(frozen=True, kw_only=True)
        ... class TailArgs(RunArgs):
        ...     lines: int = 10
        >>> args = parse_arguments(TailArgs, ["runs/gsm8k", "--lines", "5"], prog="tail")
        >>> args.run.name, args.lines
        ('gsm8k', 5)
    """

    run: tyro.conf.Positional[Path]
    """The run's folder."""


@contextmanager
def ends_with_its_reader() -> Generator[None]:
    """End the process with exit code 141, as SIGPIPE would, where the reader of its output has gone.

    Without any standard output (``>&-``) what it prints is lost, and it succeeds.
    """
    if sys.stdout is None:
        # The lowest free number, which is that of standard output: no other file gets it.
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        output = select.poll()
        output.register(1, 0)
        if not output.poll(0):
            raise  # it is another pipe, such as one to a process of the run
        # Python would report it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise SystemExit(141) from None


def run_command(
    app: str,
    commands: Mapping[str, Command],
    argv: Sequence[str] | None,
    *,
    usage: str,
    settings: Callable[[], Settings] = dict,
    kinds: "Callable[[], Mapping[str, Kind]]" = dict,
    not_resumed: Collection[str] = (),
) -> None:
    """Run one of an app's commands, or of those that all apps have: report, trace, logs and doctor.

    Wrong input ends it with exit code 2 and one message, an interruption with 130.

    Args:
        app: name of the command, and of its distribution.
        commands: the app's own commands, by name.
        argv: the arguments after the app's name; None: those of this process.
        usage: printed for ``--help``.
        settings: returns the options of the app's own commands, for completion in a shell.
        kinds: returns the kinds of the app's runs, for their reports; see `render_report`.
        not_resumed: commands that do not continue after an interruption when they are called again.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    commands = {
        **commands,
        "report": partial(_report, app, kinds),
        "trace": partial(_trace, app),
        "logs": partial(_logs, app),
        "doctor": partial(_check_machines, app),
    }
    if not args or args[0] in ("-h", "--help"):
        with ends_with_its_reader():
            print(f"{usage}\n{EPILOG}", end="")
        raise SystemExit(0 if args else 2)
    if args[0] == "--version":
        print_version(app)
        return
    if args[0] == "--print-completion":
        from gcore_runs.doctor.command import DoctorArgs

        shared = {"report": RunArgs, "trace": TraceArgs, "logs": LogsArgs, "doctor": DoctorArgs}
        print_completion(app, {**shared, **settings()}, args[1:])
        return
    command = args[0]
    if command not in commands:
        print(
            f"{app}: error: unknown command {command!r}; expected one of {', '.join(commands)}",
            file=sys.stderr,
        )
        raise SystemExit(2)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        with ends_with_its_reader():
            commands[command](args[1:])
    except KeyboardInterrupt:
        message = f"{app}: interrupted"
        if command not in not_resumed:
            message += "; the same command continues from the last finished step"
        print(message, file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        if isinstance(error, OSError):
            message = describe_os_error(error)
        elif isinstance(error, _expected_errors()):
            message = one_line(error)
        else:
            raise
        print(f"{app}: error: {message}", file=sys.stderr)
        raise SystemExit(2) from None


def print_version(app: str) -> None:
    """Print an app's name and version."""
    with ends_with_its_reader():
        print(f"{app} {version(app)}")


def print_completion(app: str, settings: Settings, args: Sequence[str]) -> None:
    """Print the script by which a shell, the only argument, completes the app's commands and their options."""
    if len(args) != 1 or args[0] not in SHELLS:
        print(f"{app}: error: expected --print-completion {' or '.join(SHELLS)}", file=sys.stderr)
        raise SystemExit(2)
    with ends_with_its_reader():
        tyro.extras.subcommand_cli_from_dict(
            dict(settings),
            prog=app,
            args=["--tyro-print-completion", args[0]],
            config=(tyro.conf.FlagConversionOff,),
        )


def _expected_errors() -> tuple[type[Exception], ...]:
    """Return the errors that are shown without a traceback, when there is one: their packages take time to import."""
    from gcore_ckpt import CheckpointError
    from gcore_controller import ControllerError
    from gcore_rollout import RolloutError
    from gcore_trainer import TrainerError

    return (UserError, RankError, CheckpointError, ControllerError, RolloutError, TrainerError)


def run_training(
    config: ConfigT,
    train: "Callable[[ConfigT, Display], RunResult]",
    *,
    title: str,
    labels: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Train with a display, and show the held-out metrics before and after; exit code 3 if nothing was learned.

    The table has the metrics with ``labels``, or if there are none all of ``val/``.
    """
    from rich.table import Table

    from gcore_runs.loop.recorder import Display, format_metric

    with Display() as display:
        result = train(config, display)
    if result.before:
        before = f"before, step {result.before['step']}"
        after = f"after, step {result.after['step']}"
        table = Table("", before, after, title=title, title_justify="left")
        if not labels:
            names = [name for name in sorted(result.before) if name.startswith("val/")]
            labels = {name: name.rpartition("/")[2].replace("_", " ") for name in names}
        for name, label in labels.items():
            if name in result.before:
                table.add_row(
                    label, format_metric(result.before[name]), format_metric(result.after[name])
                )
        display.console.print(table)
    display.say(f"report:  {result.run / 'report.html'}")
    if (result.run / "export").is_dir():
        display.say(f"export:  {result.run / 'export'}")
    if not result.has_signal:
        raise SystemExit(NOTHING_LEARNED)


def print_table(
    title: str, columns: Sequence[str], sections: Sequence[Sequence[Sequence[str]]]
) -> None:
    """Print a table on the screen; numbers are aligned on the right. ``sections`` are rows with lines between them."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        cells = [row[index].replace(",", "").rstrip("%") for row in chain.from_iterable(sections)]
        table.add_column(column, justify="right" if all(map(str.isdecimal, cells)) else "left")
    for rows in sections:
        for row in rows:
            table.add_row(*row)
        table.add_section()
    Console().print(table)


def _report(app: str, kinds: "Callable[[], Mapping[str, Kind]]", args: Sequence[str]) -> None:
    """Write a run's report again, and print its path; see `render_report`."""
    parsed = parse_arguments(
        RunArgs, args, prog=f"{app} report", description="Write a run's report.html again."
    )
    from gcore_runs.report.page import render_report
    from gcore_runs.run_folder import RunFolder

    print(render_report(RunFolder.existing(parsed.run).path, kinds()))


@dataclass(frozen=True, kw_only=True)
class TraceArgs(RunArgs, Checked):
    """Write a run's timeline as trace.json, which ui.perfetto.dev opens."""

    last: NonNegative = 0
    """How many steps, the last ones; 0: all of them."""


def _trace(app: str, args: Sequence[str]) -> None:
    """Write a run's `trace.json`, and print its path; see `gcore_runs.report.trace.write_trace`."""
    parsed = parse_arguments(TraceArgs, args, prog=f"{app} trace")
    from gcore_runs.report.trace import write_trace
    from gcore_runs.run_folder import RunFolder

    print(write_trace(RunFolder.existing(parsed.run), last=parsed.last))


@dataclass(frozen=True, kw_only=True)
class LogsArgs(RunArgs, Checked):
    """Show what a run's processes logged, merged by time."""

    follow: bool = False
    """Continue with what is logged from now on, until Ctrl-C."""
    role: str = ""
    """Only processes of this role: main, controller, engine, trainer, ...; empty: all."""
    rank: int | None = None
    """Only processes of this rank; None: all."""
    lines: NonNegative = 0
    """How many of the existing lines, the last ones; 0: all of them."""


def _logs(app: str, args: Sequence[str]) -> None:
    """Print what the processes of a run have logged, by time."""
    parsed = parse_arguments(LogsArgs, args, prog=f"{app} logs")
    from gcore_runs.logs import merged_lines
    from gcore_runs.run_folder import RunFolder

    folder = RunFolder.existing(parsed.run).path / "logs"
    try:
        for line in merged_lines(
            folder, role=parsed.role, rank=parsed.rank, last=parsed.lines, follow=parsed.follow
        ):
            print(printable(line), flush=parsed.follow)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _check_machines(app: str, args: Sequence[str]) -> None:
    from gcore_runs.doctor.command import doctor_command

    doctor_command(app, args)
