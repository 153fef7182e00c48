"""The `gcore-ckpt` command: looks into checkpoints, checks, compares, converts and prunes them.

Exit code 0: fine. 1: `diff` found a difference, `verify` damage. 2: wrong use, or an error, in one line. 130: Ctrl-C.
141: the reader of the output has gone.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from gcore_ckpt.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError
from gcore_ckpt.format.stored import Index, StoredTensor
from gcore_ckpt.loading.reader import (
    Step,
    StepReader,
    find_step,
    open_step,
    read_metric,
    step_leaves,
    verify,
)
from gcore_ckpt.storage import Storage, open_for_writing
from gcore_ckpt.storage.local import open_storage

if TYPE_CHECKING:
    from gcore_ckpt.tiers.tier import BestMode

_STEP_IN_PATH = re.compile(r"(.+)@(\d+)", re.ASCII | re.DOTALL)
_EXIT_FOUND = 1
_EXIT_ERROR = 2
_EXIT_INTERRUPTED = 130
_EXIT_NO_READER = 141
_FILE_WIDTH = 10_000  # columns where the output is no terminal: nothing is cut or folded
_NAMED_WRITERS = 3
_VALUE_WIDTH = 200


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; wrong use raises `SystemExit(2)`."""
    if sys.stdout is None:  # closed by the caller
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        try:
            arguments = vars(_parser().parse_args(argv))
            return arguments.pop("run")(**arguments)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader, such as head, has gone. Python would report it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return _EXIT_NO_READER
    except (CheckpointError, ValueError, OSError) as error:
        print(f"gcore-ckpt: error: {_plain(str(error).replace(chr(10), ' '))}", file=sys.stderr)
        return _EXIT_ERROR


def _ls(path: str, *, as_json: bool) -> int:
    storage = open_storage(path)
    entries: list[dict[str, Any]] = []
    for step in storage.steps() or [find_step(storage, "latest")]:
        try:
            with open_step(storage, step) as reader:
                entries.append({"step": step, **_summary(reader.index)})
        except CorruptCheckpointError as error:
            entries.append({"step": step, "damaged": str(error)})
        except CheckpointNotFoundError:  # a writer has just deleted it
            continue
    set_aside = storage.steps_set_aside()
    if as_json:
        print(json.dumps({"steps": entries, "set_aside": set_aside}))
        return 0
    columns = ("step", "size", "tensors", "saved at", "ranks", "metric")
    rows = [_row_of(entry) for entry in entries]
    if not any("metric" in entry for entry in entries):
        columns = columns[:-1]
        rows = [row[:-1] for row in rows]
    _print_table(columns, rows, right=("step", "size", "tensors"))
    if set_aside:
        _say("")
        _say(f"set aside by rollback: {_format_steps(set_aside)}")
    return 0


def _summary(index: Index) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "size_bytes": _size_bytes(index),
        "tensors": len(index.tensors),
        "saved_at": index.saved_at,
        "ranks": index.num_ranks,
    }
    if index.metric is not None:
        summary["metric"] = index.metric
    return summary


def _row_of(entry: dict[str, Any]) -> Sequence[str]:
    label = "-" if entry["step"] is None else str(entry["step"])
    if "damaged" in entry:
        return label, "-", "-", f"damaged: {entry['damaged']}", "-", "-"
    size = decimal(entry["size_bytes"])
    return (
        label,
        size,
        str(entry["tensors"]),
        entry["saved_at"] or "-",
        str(entry["ranks"]),
        str(entry.get("metric", "-")),
    )


def _show(path: str, step: Step, tensors: str) -> int:
    storage = open_storage(path)
    with open_step(storage, find_step(storage, step)) as reader:
        leaves = step_leaves(reader, tensors)
        index = reader.index
    if tensors and not leaves:
        raise ValueError(f"{reader.where} holds nothing under {tensors!r}")
    saved = f", saved at {index.saved_at} by {index.num_ranks} rank(s)" if index.saved_at else ""
    _say(f"{reader.where}: {decimal(_size_bytes(index))} in {len(index.files)} file(s){saved}")
    first: dict[str, str] = {}
    rows: list[Sequence[str]] = []
    for leaf in leaves:
        if leaf.tensor is not None:
            tensor = index.tensors[leaf.tensor]
            shape = tensor.shape_of(leaf.view)
            size = ""
            num_shards = ""
            if leaf.view is not None:
                writers = f"in the memory of {leaf.tensor}"
            elif leaf.tensor in first:
                writers = f"the same as {first[leaf.tensor]}"
            else:
                first[leaf.tensor] = leaf.path
                size = decimal(tensor.size_bytes)
                num_shards = str(len(tensor.shards))
                writers = _writers(tensor, index)
            rows.append((leaf.path, tensor.dtype, str(list(shape)), size, num_shards, writers))
    values = [(leaf.path, _short(repr(leaf.value))) for leaf in leaves if leaf.tensor is None]
    if rows:
        _say("")
        _print_table(
            ("tensor", "dtype", "shape", "size", "shards", "written by"), rows, right=("size",)
        )
    if values:
        _say("")
        _print_table(("value", "is"), values)
    return 0


def _verify(path: str, step: Step, *, every: bool) -> int:
    storage = open_storage(path)
    is_damaged = False
    steps: list[int | None] = []
    if every:
        steps.extend(storage.steps())
    for number in steps or [find_step(storage, step)]:
        label = path
        step_or_latest: Step = "latest"
        if number is not None:
            label = f"step {number}"
            step_or_latest = number
        try:
            with open_step(storage, number) as reader:
                tensors = reader.index.tensors.values()
            with _progress_bar(label, sum(tensor.size_bytes for tensor in tensors)) as progress:
                verify(path, step_or_latest, progress=progress)
            result = "fine"
            for tensor in tensors:
                if any(shard.checksums is None for shard in tensor.shards):
                    result = "all bytes can be read; it has no checksums to check them against"
            _say(f"{label}: {result}")
        except CorruptCheckpointError as error:
            is_damaged = True
            _say(f"{label}: damaged: {error}")
        except CheckpointNotFoundError:
            if not every:
                raise
            _say(f"{label}: was deleted meanwhile")
    return _EXIT_FOUND if is_damaged else 0


def _diff(a: str, b: str, step_a: int | None, step_b: int | None) -> int:
    from gcore_ckpt.tools.compare import compare

    with (
        _open_named_step(a, step_a, "--step-a") as first,
        _open_named_step(b, step_b, "--step-b") as second,
    ):
        rows = [
            (aspect, path, _short(text_a or "-"), _short(text_b or "-"))
            for aspect, path, text_a, text_b in compare(first, second)
        ]
    if not rows:
        _say(f"{first.where} and {second.where} hold the same")
        return 0
    _print_table(("differs in", "leaf", first.where, second.where), rows)
    _say("")
    _say(f"{len(rows)} difference(s) between {first.where} and {second.where}")
    return _EXIT_FOUND


@contextmanager
def _open_named_step(path: str, step: int | None, option: str) -> Generator[StepReader]:
    """Open the step that `PATH`, `PATH@STEP` or an option names."""
    match = _STEP_IN_PATH.fullmatch(path)
    if match is not None:
        if step is not None:
            raise ValueError(
                f"{path} names step {match[2]} and {option} is {step}; expected one or the other"
            )
        path = match[1]
        step = int(match[2])
    storage = open_storage(path)
    with open_step(storage, find_step(storage, "latest" if step is None else step)) as reader:
        yield reader


def _export_hf(path: str, out: str, **options: Any) -> int:
    from gcore_ckpt.tools.hugging_face import export_hf

    with _progress_bar(f"to {out}", None) as progress:
        export_hf(path, out, progress=progress, **options)
    _say(f"wrote {out}")
    return 0


def _import_dcp(source: str, path: str, step: int) -> int:
    from gcore_ckpt.tools.dcp import import_dcp

    return _import(import_dcp, source, path, step)


def _import_pt(source: str, path: str, step: int) -> int:
    from gcore_ckpt.tools.torch_file import import_pt

    return _import(import_pt, source, path, step)


def _import(read: Callable[..., None], source: str, path: str, step: int) -> int:
    read(source, path, step=step)
    _say(f"saved step {step} to {path}")
    return 0


def _prune(
    path: str,
    *,
    keep: int | None,
    keep_every: int | None,
    keep_best: int | None,
    best_mode: "BestMode",
    above: int | None,
    set_aside: bool,
    dry_run: bool,
) -> int:
    from gcore_ckpt.tiers.tier import Tier

    for option, value in (("--keep-every", keep_every), ("--keep-best", keep_best)):
        if keep is None and value is not None:
            raise ValueError(f"{option} is {value} without --keep; expected both")
    tier = Tier(path, keep=keep, keep_every=keep_every, keep_best=keep_best, best_mode=best_mode)
    storage = open_storage(path)
    if not storage.steps() and not storage.steps_set_aside():
        raise CheckpointNotFoundError(f"{storage} holds no committed step")

    def find_superfluous() -> list[int]:
        if set_aside:
            return storage.steps_set_aside()
        steps = storage.steps()
        if above is not None:
            return [step for step in steps if step > above]
        return tier.find_superfluous(steps, None, partial(read_metric, storage))

    if dry_run:
        _say(f"would delete {_format_steps(find_superfluous())}")
        return 0
    with open_for_writing(storage):
        steps = find_superfluous()
        if set_aside:
            storage.remove_set_aside()
        else:
            _remove(storage, steps)
    _say(f"deleted {_format_steps(steps)}")
    return 0


def _rm(path: str, steps: list[int]) -> int:
    storage = open_storage(path)
    steps = sorted(set(steps))
    for step in steps:
        find_step(storage, step)
    with open_for_writing(storage):
        _remove(storage, steps)
    _say(f"deleted {_format_steps(steps)}")
    return 0


def _rollback(path: str, step: int) -> int:
    storage = open_storage(path)
    find_step(storage, step)
    with open_for_writing(storage):
        later = [later_step for later_step in storage.steps() if later_step > step]
        storage.set_aside(later)
    _say(f"set aside {_format_steps(later)}; the latest step is {step}")
    return 0


def _remove(storage: Storage, steps: Sequence[int]) -> None:
    for step in reversed(
        steps
    ):  # an interruption never leaves a later step without those before it
        storage.remove(step)


def _format_steps(steps: Sequence[int]) -> str:
    return f"step(s) {', '.join(map(str, steps))}" if steps else "nothing"


def _size_bytes(index: Index) -> int:
    return sum(file.size_bytes for file in index.files.values())


def _writers(tensor: StoredTensor, index: Index) -> str:
    writers = list(
        dict.fromkeys(index.files[shard.file].writer or shard.file for shard in tensor.shards)
    )
    more = f" and {len(writers) - _NAMED_WRITERS} more" if len(writers) > _NAMED_WRITERS else ""
    return ", ".join(writers[:_NAMED_WRITERS]) + more


def _short(text: str) -> str:
    return text if len(text) <= _VALUE_WIDTH else f"{text[:_VALUE_WIDTH]}..."


def _plain(text: str) -> str:
    """Return the text without control characters, which names in a checkpoint may contain."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _console() -> Console:
    """Return standard output as it is now."""
    width = None if sys.stdout.isatty() else _FILE_WIDTH
    return Console(file=sys.stdout, width=width, highlight=False, emoji=False)


def _say(line: str) -> None:
    """Print a line as it is, for people and for pipes."""
    _console().print(Text(_plain(line)), soft_wrap=True)


def _print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()
) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in columns:
        table.add_column(
            Text(_plain(name)), justify="right" if name in right else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(_plain(cell)) for cell in row))
    _console().print(table)


@contextmanager
def _progress_bar(label: str, total_bytes: int | None) -> Generator[Callable[[int], None]]:
    """Show on standard error, where that is a terminal, how many bytes are done; give what to call with more."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    errors = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(
        *columns, console=errors, transient=True, disable=not errors.is_terminal
    ) as progress:
        task = progress.add_task(_plain(label), total=total_bytes)
        yield lambda size_bytes: progress.advance(task, size_bytes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gcore-ckpt",
        description="Looks into checkpoints, checks, compares, converts, rolls back and prunes them. PATH is a folder "
        "or a URL such as s3://bucket/folder; ls, show, verify, diff and export-hf read a Hugging Face folder too.",
        epilog="gcore-ckpt COMMAND --help shows its options and an example. Exit codes: 0 fine, 1 different or "
        "damaged, 2 an error, 130 interrupted.",
    )
    parser.add_argument(
        "--version", action="version", version=f"gcore-ckpt {version('gcore-ckpt')}"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(run: Callable[..., int], example: str, text: str, *positional: str) -> Any:
        name = example.partition(" ")[0]
        added = commands.add_parser(
            name, help=text, description=text, epilog=f"example: gcore-ckpt {example}"
        )
        added.set_defaults(run=run)
        for argument in positional:
            added.add_argument(argument, metavar=argument.upper())
        return added

    step: dict[str, Any] = {
        "type": _step,
        "metavar": "N",
        "default": "latest",
        "help": "number (default: the latest)",
    }
    number: dict[str, Any] = {"type": _number, "metavar": "N"}

    listing = command(_ls, "ls runs/a", "Lists the steps of a path.", "path")
    listing.add_argument(
        "--json", dest="as_json", action="store_true", help="as one JSON object, for programs"
    )

    show = command(
        _show, "show runs/a --step 100 --tensors model", "Shows what a step holds.", "path"
    )
    show.add_argument("--step", **step)
    show.add_argument(
        "--tensors", metavar="PREFIX", default="", help="only what is under this dotted path"
    )

    check = command(
        _verify, "verify runs/a --all", "Reads every byte of a step and checks it.", "path"
    )
    which = check.add_mutually_exclusive_group()
    which.add_argument("--step", **step)
    which.add_argument("--all", dest="every", action="store_true", help="all steps")

    text = "Compares two steps, leaf by leaf and byte by byte; exit code 1 if they differ."
    diff = command(_diff, "diff runs/a@100 runs/b@100", text)
    for side in ("a", "b"):
        diff.add_argument(side, metavar=side.upper(), help="PATH, or PATH@STEP")
        diff.add_argument(
            f"--step-{side}", **number, help=f"step of {side.upper()} (default: latest)"
        )

    example = "export-hf runs/a out --prefix model --dtype bfloat16 --config-from Qwen3-0.6B"
    text = "Writes weights as a folder that from_pretrained of transformers loads."
    export = command(_export_hf, example, text, "path")
    export.add_argument("out", metavar="OUT", help="the folder to write; new, or empty")
    export.add_argument("--step", **step)
    export.add_argument(
        "--prefix", default="", help="dotted path of the part of the state to write, such as model"
    )
    export.add_argument(
        "--dtype",
        help="what floating-point tensors become, such as bfloat16 (default: as they are)",
    )
    export.add_argument(
        "--config-from", metavar="DIR", help="folder to copy config and tokenizer files from"
    )
    help_text = "largest file (default: %(default)s)"
    export.add_argument(
        "--max-shard-bytes", type=int, metavar="N", default=5_000_000_000, help=help_text
    )

    text = "Saves a checkpoint of torch.distributed.checkpoint as a step."
    dcp = command(_import_dcp, "import-dcp old/step-100 runs/a --step 100", text)
    dcp.add_argument("source", metavar="SOURCE", help="the folder that holds .metadata")

    text = "Saves a file of torch.save as a step; nothing in the file is called, as with weights_only=True."
    pt = command(_import_pt, "import-pt old/model.pt runs/a --step 100", text)
    pt.add_argument("source", metavar="SOURCE", help="the file")
    for importer in (dcp, pt):
        importer.add_argument("path", metavar="PATH")
        importer.add_argument(
            "--step", **number, default=0, help="number of the step (default: %(default)s)"
        )

    text = (
        "Deletes steps: all but the latest, all above one, or those that were set aside. It does not ask; refused "
        "while a writer has the path open."
    )
    prune = command(_prune, "prune runs/a --keep 3 --keep-every 1000 --dry-run", text, "path")
    which = prune.add_mutually_exclusive_group(required=True)
    which.add_argument("--keep", type=int, metavar="N", help="how many of the latest stay")
    which.add_argument("--above", **number, help="delete the steps above this one")
    which.add_argument(
        "--set-aside", action="store_true", help="delete the steps that were set aside by rollback"
    )
    prune.add_argument(
        "--keep-every", type=int, metavar="M", help="with --keep: multiples of this stay too"
    )
    help_text = "with --keep: this many of those with the best metrics stay too"
    prune.add_argument("--keep-best", type=int, metavar="K", help=help_text)
    help_text = "which metric is the best (default: %(default)s)"
    prune.add_argument("--best-mode", choices=("max", "min"), default="max", help=help_text)
    prune.add_argument("--dry-run", action="store_true", help="only print what would be deleted")

    text = "Deletes the given steps. It does not ask; refused while a writer has the path open."
    rm = command(_rm, "rm runs/a 300 400", text, "path")
    rm.add_argument(
        "steps", metavar="STEP", type=_number, nargs="+", help="number of a step to delete"
    )

    text = (
        "Makes a step the latest: the steps above it are set aside. They are kept until prune --set-aside, but never "
        "loaded and not counted by --keep. Refused while a writer has the path open."
    )
    rollback = command(_rollback, "rollback runs/a 200", text, "path")
    rollback.add_argument(
        "step", metavar="STEP", type=_number, help="number of the step to continue from"
    )
    return parser


def _step(text: str) -> Step:
    return "latest" if text == "latest" else _number(text)


def _number(text: str) -> int:
    if not re.fullmatch(r"\d+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"is {text!r}; expected a number of 0 or more")
    return int(text)
