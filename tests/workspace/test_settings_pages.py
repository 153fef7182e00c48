"""The pages of settings are those that the dataclasses give."""

import pytest
from settings_pages import FOLDER, PAGES, page


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_up_to_date(name: str) -> None:
    written = (FOLDER / f"{name}.md").read_text()
    assert page(*PAGES[name]) == written, "run: uv run python scripts/docs/settings_pages.py"


def test_ranges_defaults_and_meanings_are_there() -> None:
    text = page(*PAGES["settings-train"])
    expected = (
        "| `train_batch_size` | integer, 1 or more | `32` | Prompts a step, each with rollout.n responses. |",
        '| `target_modules` | list of text | `["all-linear"]` |',
        "| `clip_ratio_low` | a number in [0, 1] | `0.2` |",
        '| `schedule` | `sync`, `one_step_off`, `async` | `"sync"` |',
    )
    assert [row for row in expected if row not in text] == []
