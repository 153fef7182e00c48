"""Tables of docs/reference/open-questions.md, from the figures of `gcore-bench placement`.

``gcore-bench placement --parts study --json figures.json`` writes the figures; ``uv run python
scripts/docs/study_tables.py figures.json`` then replaces the table, and the aim after it, under each comment
``<!-- table: TITLE -->`` of the page. Tables without figures in the file stay as they are.
"""

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gcore_bench.placement.tables import FigureTable, format_rows

PAGE = Path(__file__).parents[2] / "docs/reference/open-questions.md"
_TABLE = re.compile(r"(?m)^<!-- table: (.*) -->\n\n((?:\|.*\n)*(?:\naim: .*\n)*)")


def list_titles(page: str) -> list[str]:
    """Return the titles of the page's tables."""
    return [title for title, _ in _TABLE.findall(page)]


def read_sections(figures: Path) -> dict[str, str]:
    """Return the tables of a file of figures as Markdown, by title."""
    sections: dict[str, str] = {}
    for part in json.loads(figures.read_text())["parts"]:
        table = FigureTable(
            title=part["title"], columns=part["columns"], rows=part["rows"], aims=part["aims"]
        )
        aims = "".join(f"\n{aim}\n" for aim in table.aims)
        sections[table.title] = format_markdown(list(table.columns), format_rows(table)) + aims
    return sections


def format_markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def update_page(page: str, sections: Mapping[str, str]) -> str:
    """Return the page with the tables of these sections."""
    return _TABLE.sub(
        lambda match: f"<!-- table: {match[1]} -->\n\n{sections.get(match[1], match[2])}", page
    )


if __name__ == "__main__":
    PAGE.write_text(update_page(PAGE.read_text(), read_sections(Path(sys.argv[1]))))
