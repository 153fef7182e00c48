"""Tables of docs/reference/open-questions.md, from the files that simulations of placement have written.

``gcore-bench placement --parts sweep study`` writes `study/`; ``uv run python scripts/docs/study_tables.py study`` then
replaces the table, and the aim after it, under each comment ``<!-- table: TITLE -->`` of the page. Tables of sections
that are not in the folder stay as they are.
"""

import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/reference/open-questions.md"
_TABLE = re.compile(r"(?m)^<!-- table: (.*) -->\n\n((?:\|.*\n)*(?:\naim: .*\n)*)")


def titles(page: str) -> list[str]:
    """Return the titles of the page's tables."""
    return [title for title, _ in _TABLE.findall(page)]


def sections(folder: Path) -> dict[str, str]:
    """Return the sections of all files, by title."""
    text = "\n".join(path.read_text() for path in sorted(folder.glob("*.md")))
    return {found[1]: found[2].strip() + "\n" for found in re.finditer(r"(?ms)^## (.*?)\n(.*?)(?=^## |\Z)", text)}


def updated(page: str, found: dict[str, str]) -> str:
    """Return the page with the tables of these sections."""
    return _TABLE.sub(lambda m: f"<!-- table: {m[1]} -->\n\n{found.get(m[1], m[2])}", page)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(), sections(Path(sys.argv[1]))))
