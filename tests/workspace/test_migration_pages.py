"""The tables of names on the pages for users of verl and TRL are those of the conversions."""

import pytest
from migration_pages import FOLDER, PAGES, page


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_up_to_date(name: str) -> None:
    text = (FOLDER / f"{name}.md").read_text()
    assert page(name) == text, "run: uv run python scripts/docs/migration_pages.py"
    assert text.count("\n| `") > 80
