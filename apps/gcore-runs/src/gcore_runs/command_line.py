"""What the command lines of all apps do alike: find the command, run it, and say what went wrong in one line."""

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

Command = Callable[[Sequence[str]], None]
"""Given the arguments behind its name."""


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
        print(usage, end="")
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
    except Exception as error:
        if not isinstance(error, expected_errors()):
            raise
        print(f"{app}: error: {error}", file=sys.stderr)
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
