"""Tables of the study and of the sweep in Markdown, under titles, from which the docs' page takes them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def spread(values: Sequence[float], *, form: str = ".2f") -> str:
    """Format the mean, and the range if there is one."""
    low, mean, high = (format(value, form) for value in (min(values), fmean(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def write_sections(folder: Path, name: str, sections: Mapping[str, str]) -> str:
    """Write a file of sections, by title, in a folder that is made if need be; return its text."""
    text = "\n".join(f"## {title}\n\n{content}" for title, content in sections.items())
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return text
