"""What the command lines of all apps do alike: find the command, run it, and say what went wrong in one line."""

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from gcore_runs.errors import check_at_least, one_line, said
from gcore_runs.settings.options import parse_arguments

Command = Callable[[Sequence[str]], None]
"""Given the arguments behind its name."""

NOTHING_LEARNED = 3
"""Exit code of a run that was completed without one step that had anything to learn from."""

EXIT_CODES = """exit codes:
  0    success
  1    an unexpected error, with a traceback
  2    wrong input, or a reward, engine or training process that failed; one message
  3    the run was completed, but no step had anything to learn from: all rewards alike, or none
  130  interrupted by Ctrl-C
"""


@dataclass(frozen=True, kw_only=True)
class RunArgs:
    """A run's folder."""

    run: tyro.conf.Positional[Path]
    """The run's folder."""


def run_command(
    app: str,
    commands: Mapping[str, Command],
    argv: Sequence[str] | None,
    *,
    usage: str,
    expected_errors: Callable[[], tuple[type[Exception], ...]],
    not_resumed: Collection[str] = (),
) -> None:
    """Run one of an app's commands; wrong input ends it with exit code 2 and one message, an interruption with 130.

    Args:
        app: as a person calls it.
        commands: by name.
        argv: the name and its arguments; None: the process's own.
        usage: what is printed for help.
        expected_errors: those that are shown without a traceback; asked for when there is one.
        not_resumed: commands that do not go on after an interruption when they are called again.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(f"{usage}\n{EXIT_CODES}", end="")
        raise SystemExit(0 if args else 2)
    command, rest = args[0], args[1:]
    if command not in commands:
        print(f"{app}: error: unknown command {command!r}: {', '.join(commands)} are known", file=sys.stderr)
        raise SystemExit(2)
    _set_environment()
    try:
        commands[command](rest)
    except KeyboardInterrupt:
        how_to_go_on = "" if command in not_resumed else "; the same command goes on from the last finished step"
        print(f"{app}: interrupted{how_to_go_on}", file=sys.stderr)
        raise SystemExit(130) from None
    except OSError as error:
        print(f"{app}: error: {said(error)}", file=sys.stderr)
        raise SystemExit(2) from None
    except Exception as error:
        if not isinstance(error, expected_errors()):
            raise
        print(f"{app}: error: {one_line(error)}", file=sys.stderr)
        raise SystemExit(2) from None


def _set_environment() -> None:
    """What must be set before torch, transformers and diffusers are imported."""
    # Idle OpenMP threads spin by default: with a neighbour on the cores, a step takes ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")


@dataclass(frozen=True, kw_only=True)
class LogsArgs:
    """What a run's processes logged, merged by time."""

    run: tyro.conf.Positional[Path]
    """The run's folder."""
    follow: bool = False
    """Go on with what is logged from now on, until Ctrl-C."""
    role: str = ""
    """Processes of this role alone: main, controller, engine, trainer, ...; empty: all."""
    rank: int | None = None
    """Processes of this rank alone; None: all."""
    lines: int = 0
    """The last lines that are there already; 0: all of them."""


def logs_command(app: str, args: Sequence[str]) -> None:
    """What the processes of a run have logged, by time."""
    parsed = parse_arguments(LogsArgs, args, prog=f"{app} logs")
    from gcore_runs.logs.merging import merged_lines
    from gcore_runs.run_folder import RunFolder

    check_at_least("lines", parsed.lines, 0)
    folder = RunFolder.existing(parsed.run).path / "logs"
    try:
        for line in merged_lines(folder, role=parsed.role, rank=parsed.rank, last=parsed.lines, follow=parsed.follow):
            print(line, flush=parsed.follow)
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        # The reader, such as head, has seen enough; Python would complain of it once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
