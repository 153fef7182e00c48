"""The tables of names in docs/coming-from-verl.md and coming-from-trl.md, from the tables of the conversions.

``uv run python scripts/docs/migration_pages.py`` writes them; a test holds that they are up to date.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import get_origin

from gcore_llm.config import TrainConfig
from gcore_llm.finetune.config import DPORunConfig, RewardModelRunConfig, SFTRunConfig
from gcore_runs.migration.keys import Key, read_keys
from gcore_runs.settings.checks import setting_types

FOLDER = Path(__file__).parents[2] / "docs"
PAGES: Mapping[str, tuple[Mapping[str, Key], tuple[type, ...]]] = {
    "coming-from-verl": (read_keys("verl"), (TrainConfig,)),
    "coming-from-trl": (
        read_keys("trl"),
        (TrainConfig, SFTRunConfig, RewardModelRunConfig, DPORunConfig),
    ),
}
"""Keys of each page, and the configs of the commands that they are converted to."""
_PART = re.compile(r"(<!-- names:.*?-->\n).*?(<!-- end of names -->)", re.DOTALL)


def page(name: str) -> str:
    """Return the page with its table as the conversions have it."""
    text, table = (FOLDER / f"{name}.md").read_text(), _table(*PAGES[name])
    found, count = _PART.subn(lambda part: f"{part[1]}{table}\n{part[2]}", text)
    assert count == 1, f"{name}.md has no place for the table"
    return found


def _table(keys: Mapping[str, Key], configs: tuple[type, ...]) -> str:
    types = {name: kind for config in configs for name, kind in setting_types(config).items()}
    tables = {name for name, kind in types.items() if get_origin(kind) is dict}
    rows = ["", "| theirs | here |", "|---|---|"]
    for name, key in keys.items():
        known = (s for s in key.ours if s in types or s.rpartition(".")[0] in tables)
        ours = [f"`{setting}`" for setting in known]
        rows += [f"| `{name}` | {', '.join(ours)} |"] if ours else []
    rows += ["", "Missing here, unless off:", "", "| theirs | what there is |", "|---|---|"]
    rows += [
        f"| `{name}` | {key.why} |"
        for name, key in keys.items()
        if not key.ours and key.off is not None
    ]
    return "\n".join([*rows, ""])


def main() -> None:
    """Write the pages."""
    for name in PAGES:
        (FOLDER / f"{name}.md").write_text(page(name))


if __name__ == "__main__":
    main()
