"""The `gcore-ckpt` command: looks into checkpoints, checks, compares, converts and prunes them.

Exit code 0: fine. 1: `diff` found a difference, `verify` damage. 2: wrong use, or an error, in one line. 130: Ctrl-C.
"""

import argparse
import re
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from gcore_ckpt.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from gcore_ckpt.loading.reader import Step, find_step, open_step
from gcore_ckpt.storage import Storage, open_storage
from gcore_ckpt.tools.cli_tables import (
    Row,
    plain,
    print_differences,
    print_step,
    print_steps,
    progress_bar,
    say,
    step_label,
    step_row,
)

_STEP_IN_PATH = re.compile(r"(.+)@(\d+)", re.ASCII | re.DOTALL)
_EXIT_FOUND, _EXIT_ERROR, _EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; wrong use raises `SystemExit(2)`."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except (CheckpointError, ValueError, OSError) as error:
        print(f"gcore-ckpt: error: {plain(str(error).replace(chr(10), ' '))}", file=sys.stderr)
        return _EXIT_ERROR


def _ls(arguments: argparse.Namespace) -> int:
    storage = open_storage(arguments.path)
    rows: list[Row] = []
    for step in storage.steps() or [find_step(storage, "latest")]:
        try:
            with open_step(storage, step) as reader:
                rows.append(step_row(step, reader.index))
        except CorruptCheckpointError as error:
            rows.append((step_label(step), "-", "-", f"damaged: {error}", "-"))
        except CheckpointNotFoundError:  # a writer has just deleted it
            continue
    print_steps(rows)
    if set_aside := storage.steps_set_aside():
        say("")
        say(f"set aside by rollback: {_listed(set_aside)}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from gcore_ckpt.loading.listing import step_leaves

    storage = open_storage(arguments.path)
    with open_step(storage, find_step(storage, arguments.step)) as reader:
        leaves = step_leaves(reader, arguments.tensors)
        if arguments.tensors and not leaves:
            raise ValueError(f"{reader.where} holds nothing under {arguments.tensors!r}")
        print_step(reader, leaves)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    storage = open_storage(arguments.path)
    steps = list(storage.steps()) if arguments.all else []
    damaged = 0
    for step in steps or [find_step(storage, arguments.step)]:
        label = arguments.path if step is None else f"step {step}"
        try:
            say(f"{label}: {_verify_step(arguments.path, step, label)}")
        except CorruptCheckpointError as error:
            damaged += 1
            say(f"{label}: damaged: {error}")
        except CheckpointNotFoundError:
            if not arguments.all:
                raise
            say(f"{label}: was deleted meanwhile")
    return _EXIT_FOUND if damaged else 0


def _verify_step(path: str, step: int | None, label: str) -> str:
    from gcore_ckpt.loading.verify import verify

    with open_step(open_storage(path), step) as reader:
        tensors = reader.index.tensors.values()
        total_bytes = sum(tensor.size_bytes for tensor in tensors)
        checked = all(shard.checksums is not None for tensor in tensors for shard in tensor.shards)
    with progress_bar(label, total_bytes) as progress:
        verify(path, "latest" if step is None else step, progress=progress)
    return "fine" if checked else "all bytes can be read; it has no checksums to check them against"


def _diff(arguments: argparse.Namespace) -> int:
    from gcore_ckpt.tools.compare import compare

    path_a, step_a = _split_path(arguments.a, arguments.step_a, "--step-a")
    path_b, step_b = _split_path(arguments.b, arguments.step_b, "--step-b")
    storage_a, storage_b = open_storage(path_a), open_storage(path_b)
    with (
        open_step(storage_a, find_step(storage_a, step_a)) as a,
        open_step(storage_b, find_step(storage_b, step_b)) as b,
    ):
        count = print_differences(compare(a, b), a.where, b.where)
    return _EXIT_FOUND if count else 0


def _split_path(path: str, step: int | None, option: str) -> tuple[str, Step]:
    match = _STEP_IN_PATH.fullmatch(path)
    if match is None:
        return path, "latest" if step is None else step
    if step is not None:
        raise ValueError(f"{path} names step {match[2]} and {option} is {step}; expected one or the other")
    return match[1], int(match[2])


def _export_hf(arguments: argparse.Namespace) -> int:
    from gcore_ckpt.tools.hugging_face import export_hf

    with progress_bar(f"to {arguments.out}", None) as progress:
        export_hf(
            arguments.path,
            arguments.out,
            step=arguments.step,
            prefix=arguments.prefix,
            dtype=arguments.dtype,
            max_shard_bytes=arguments.max_shard_bytes,
            config_from=arguments.config_from,
            progress=progress,
        )
    say(f"wrote {arguments.out}")
    return 0


def _import_dcp(arguments: argparse.Namespace) -> int:
    from gcore_ckpt.tools.dcp import import_dcp

    import_dcp(arguments.source, arguments.path, step=arguments.step)
    say(f"saved step {arguments.step} to {arguments.path}")
    return 0


def _prune(arguments: argparse.Namespace) -> int:
    from gcore_ckpt.storage.retention import Retention

    if arguments.keep is None and arguments.keep_every is not None:
        raise ValueError(f"--keep-every is {arguments.keep_every} without --keep; expected both")
    retention = Retention(keep=arguments.keep, keep_every=arguments.keep_every)
    storage = open_storage(arguments.path)
    if not storage.steps() and not storage.steps_set_aside():
        raise CheckpointNotFoundError(f"{storage} holds no committed step")

    def superfluous() -> list[int]:
        if arguments.set_aside:
            return storage.steps_set_aside()
        steps = storage.steps()
        return retention.superfluous(steps) if arguments.above is None else [s for s in steps if s > arguments.above]

    if arguments.dry_run:
        say(f"would delete {_listed(superfluous())}")
        return 0
    with _writing_to(storage):
        steps = superfluous()
        if arguments.set_aside:
            storage.remove_set_aside()
        else:
            _remove(storage, steps)
    say(f"deleted {_listed(steps)}")
    return 0


def _rm(arguments: argparse.Namespace) -> int:
    storage = open_storage(arguments.path)
    steps = sorted(set(arguments.steps))
    for step in steps:
        find_step(storage, step)
    with _writing_to(storage):
        _remove(storage, steps)
    say(f"deleted {_listed(steps)}")
    return 0


def _rollback(arguments: argparse.Namespace) -> int:
    storage = open_storage(arguments.path)
    find_step(storage, arguments.step)
    with _writing_to(storage):
        later = [step for step in storage.steps() if step > arguments.step]
        storage.set_aside(later)
    say(f"set aside {_listed(later)}; the latest step is {arguments.step}")
    return 0


@contextmanager
def _writing_to(storage: Storage) -> Generator[None]:
    storage.acquire()
    try:
        yield
    finally:
        storage.release()


def _remove(storage: Storage, steps: Sequence[int]) -> None:
    for step in reversed(steps):  # an interruption never leaves a later step without those before it
        storage.remove(step)


def _listed(steps: Sequence[int]) -> str:
    return f"step(s) {', '.join(map(str, steps))}" if steps else "nothing"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gcore-ckpt",
        description="Looks into checkpoints, checks, compares, converts, rolls back and prunes them. PATH is a folder "
        "or a URL such as s3://bucket/folder; ls, show, verify, diff and export-hf read a Hugging Face folder too.",
        epilog="gcore-ckpt COMMAND --help shows its options and an example. Exit codes: 0 fine, 1 different or "
        "damaged, 2 an error, 130 interrupted.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], int], text: str, example: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text, epilog=f"example: gcore-ckpt {example}")
        added.set_defaults(run=run)
        return added

    step: dict[str, Any] = {"type": _step, "metavar": "N", "default": "latest", "help": "number (default: the latest)"}

    ls = command("ls", _ls, "Lists the steps of a path.", "ls runs/a")
    ls.add_argument("path", metavar="PATH")

    show = command("show", _show, "Shows what a step holds.", "show runs/a --step 100 --tensors model")
    show.add_argument("path", metavar="PATH")
    show.add_argument("--step", **step)
    show.add_argument("--tensors", metavar="PREFIX", default="", help="only what is under this dotted path")

    verify = command("verify", _verify, "Reads every byte of a step and checks it.", "verify runs/a --all")
    verify.add_argument("path", metavar="PATH")
    which = verify.add_mutually_exclusive_group()
    which.add_argument("--step", **step)
    which.add_argument("--all", action="store_true", help="all steps")

    text = "Compares two steps, leaf by leaf and byte by byte; exit code 1 if they differ."
    diff = command("diff", _diff, text, "diff runs/a@100 runs/b@100")
    for side in ("a", "b"):
        diff.add_argument(side, metavar=side.upper(), help="PATH, or PATH@STEP")
        diff.add_argument(f"--step-{side}", type=_number, metavar="N", help=f"step of {side.upper()} (default: latest)")

    text = "Writes weights as a folder that from_pretrained of transformers loads."
    example = "export-hf runs/a out --prefix model --dtype bfloat16 --config-from Qwen3-0.6B"
    export = command("export-hf", _export_hf, text, example)
    export.add_argument("path", metavar="PATH")
    export.add_argument("out", metavar="OUT", help="the folder to write; new, or empty")
    export.add_argument("--step", **step)
    export.add_argument("--prefix", default="", help="dotted path of the part of the state to write, such as model")
    export.add_argument("--dtype", help="what floating-point tensors become, such as bfloat16 (default: as they are)")
    export.add_argument("--config-from", metavar="DIR", help="folder to copy config and tokenizer files from")
    help_text = "largest file (default: %(default)s)"
    export.add_argument("--max-shard-bytes", type=int, metavar="N", default=5_000_000_000, help=help_text)

    text = "Saves a checkpoint of torch.distributed.checkpoint as a step."
    dcp = command("import-dcp", _import_dcp, text, "import-dcp old/step-100 runs/a --step 100")
    dcp.add_argument("source", metavar="SOURCE", help="the folder that holds .metadata")
    dcp.add_argument("path", metavar="PATH")
    dcp.add_argument("--step", type=_number, metavar="N", default=0, help="number of the step (default: %(default)s)")

    text = (
        "Deletes steps: all but the latest, all above one, or those that were set aside. It does not ask; refused "
        "while a writer has the path open."
    )
    prune = command("prune", _prune, text, "prune runs/a --keep 3 --keep-every 1000 --dry-run")
    prune.add_argument("path", metavar="PATH")
    which = prune.add_mutually_exclusive_group(required=True)
    which.add_argument("--keep", type=int, metavar="N", help="how many of the latest stay")
    which.add_argument("--above", type=_number, metavar="N", help="delete the steps above this one")
    which.add_argument("--set-aside", action="store_true", help="delete the steps that were set aside by rollback")
    prune.add_argument("--keep-every", type=int, metavar="M", help="with --keep: multiples of this stay too")
    prune.add_argument("--dry-run", action="store_true", help="only print what would be deleted")

    text = "Deletes the given steps. It does not ask; refused while a writer has the path open."
    rm = command("rm", _rm, text, "rm runs/a 300 400")
    rm.add_argument("path", metavar="PATH")
    rm.add_argument("steps", metavar="STEP", type=_number, nargs="+", help="number of a step to delete")

    text = (
        "Makes a step the latest: the steps above it are set aside. They are kept until prune --set-aside, but never "
        "loaded and not counted by --keep. Refused while a writer has the path open."
    )
    rollback = command("rollback", _rollback, text, "rollback runs/a 200")
    rollback.add_argument("path", metavar="PATH")
    rollback.add_argument("step", metavar="STEP", type=_number, help="number of the step to continue from")
    return parser


def _step(text: str) -> Step:
    return "latest" if text == "latest" else _number(text)


def _number(text: str) -> int:
    if not re.fullmatch(r"\d+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a number of 0 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
