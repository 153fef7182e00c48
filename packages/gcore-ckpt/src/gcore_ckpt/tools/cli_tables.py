"""Output of the `gcore-ckpt` command: tables, sizes and a progress bar."""

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from gcore_ckpt.format.index import Index, StoredTensor
from gcore_ckpt.loading.listing import StepLeaf
from gcore_ckpt.loading.reader import StepReader
from gcore_ckpt.tools.compare import Difference

_FILE_WIDTH = 10_000  # columns where the output is no terminal: nothing is cut or folded
_NAMED_WRITERS = 3
_VALUE_WIDTH = 200

Row = tuple[str, ...]


def console() -> Console:
    """Standard output as it is now."""
    width = None if sys.stdout.isatty() else _FILE_WIDTH
    return Console(file=sys.stdout, width=width, highlight=False, emoji=False)


def say(line: str) -> None:
    """Print a line as it is, for people and for pipes."""
    console().print(Text(plain(line)), soft_wrap=True)


def plain(text: str) -> str:
    """Return the text without control characters, which names in a checkpoint may contain."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def step_row(step: int | None, index: Index) -> Row:
    """Return a step's line in the table of `ls`."""
    size_bytes = sum(file.size_bytes for file in index.files.values())
    saved_at = index.saved_at or "-"
    return step_label(step), decimal(size_bytes), str(len(index.tensors)), saved_at, str(index.num_ranks)


def print_steps(rows: Iterable[Row]) -> None:
    """Print the table of `ls`."""
    console().print(_table(("step", "size", "tensors", "saved at", "ranks"), rows, right=("step", "size", "tensors")))


def print_step(reader: StepReader, leaves: Sequence[StepLeaf]) -> None:
    """Print the output of `show`."""
    index = reader.index
    sizes = sum(file.size_bytes for file in index.files.values())
    saved = f", saved at {index.saved_at} by {index.num_ranks} rank(s)" if index.saved_at else ""
    say(f"{reader.where}: {decimal(sizes)} in {len(index.files)} file(s){saved}")
    first: dict[str, str] = {}
    rows: list[Row] = []
    for leaf in leaves:
        if leaf.tensor is not None:
            rows.append(_tensor_row(leaf, index, leaf.tensor, first.get(leaf.tensor)))
            first.setdefault(leaf.tensor, leaf.path)
    if rows:
        say("")
        console().print(_table(("tensor", "dtype", "shape", "size", "shards", "written by"), rows, right=("size",)))
    values = [(leaf.path, _short(repr(leaf.value))) for leaf in leaves if leaf.tensor is None]
    if values:
        say("")
        console().print(_table(("value", "is"), values))


def print_differences(differences: Iterable[Difference], a: str, b: str) -> int:
    """Print the table of `diff`; returns how many there are."""
    rows = [(d.kind, d.path, _short(d.a or "-"), _short(d.b or "-")) for d in differences]
    if rows:
        console().print(_table(("differs in", "leaf", a, b), rows))
        say("")
    say(f"{len(rows)} difference(s) between {a} and {b}" if rows else f"{a} and {b} hold the same")
    return len(rows)


def step_label(step: int | None) -> str:
    """Return the step's number; a Hugging Face folder has none."""
    return "-" if step is None else str(step)


@contextmanager
def progress_bar(label: str, total_bytes: int | None) -> Generator[Callable[[int], None]]:
    """Show on standard error, where that is a terminal, how many bytes are done; give what to call with more."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    errors = Console(stderr=True)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task(plain(label), total=total_bytes)
        yield lambda size_bytes: progress.advance(task, size_bytes)


def _tensor_row(leaf: StepLeaf, index: Index, name: str, same_as: str | None) -> Row:
    tensor = index.tensors[name]
    start = leaf.path, tensor.dtype, str(list(tensor.shape))
    if same_as is not None:
        return (*start, "", "", f"the same as {same_as}")
    return (*start, decimal(tensor.size_bytes), str(len(tensor.shards)), _writers(tensor, index))


def _short(text: str) -> str:
    return text if len(text) <= _VALUE_WIDTH else f"{text[:_VALUE_WIDTH]}..."


def _writers(tensor: StoredTensor, index: Index) -> str:
    writers = list(dict.fromkeys(index.files[shard.file].writer or shard.file for shard in tensor.shards))
    more = f" and {len(writers) - _NAMED_WRITERS} more" if len(writers) > _NAMED_WRITERS else ""
    return ", ".join(writers[:_NAMED_WRITERS]) + more


def _table(columns: Sequence[str], rows: Iterable[Row], right: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in columns:
        table.add_column(Text(plain(name)), justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    return table
