"""docs/recipes.md shows what the dry runs of all recipes print.

``python tests/apps/test_recipe_pages.py`` records them again.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gcore_diffusion.cli import main as diffusion_main
from gcore_diffusion.recipes.published import PUBLISHED
from gcore_llm.cli import main as llm_main
from gcore_llm.recipes.large import LARGE

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
SCRIPT = Path(__file__).parents[2] / "scripts/docs/rank_views.py"
START = "## What the dry runs print"
APPS = {**dict.fromkeys(LARGE, "gcore-llm"), **dict.fromkeys(PUBLISHED, "gcore-diffusion")}
MAINS = {"gcore-llm": llm_main, "gcore-diffusion": diffusion_main}


def section(name: str) -> str:
    """The part of the page on a recipe."""
    command = f"{APPS[name]} train --recipe {name} --dry-run --dry-run-device H100"
    return f"### {name}\n\n```console\n{command}\n```\n\n```\n{printed(name)}```\n"


def printed(name: str) -> str:
    """What the dry run of a recipe prints, on 80 columns and without a GPU."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        MAINS[APPS[name]](["train", "--recipe", name, "--dry-run", "--dry-run-device", "H100"])
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


@pytest.mark.parametrize(
    "name", [*LARGE, *(pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED)]
)
def test_the_page_shows_what_a_dry_run_prints(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where there is no folder of the model's name.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert section(name) in PAGE.read_text(), "record it again: see the top of this file"


@pytest.mark.slow
def test_the_page_shows_what_a_rank_does() -> None:
    # A process of its own, because one of Megatron-Core keeps 2 GB of tensors.
    command = [sys.executable, SCRIPT, "--print"]
    table = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert table in PAGE.read_text(), SCRIPT
    for row in table.splitlines():
        name, _, loaded_gb, planned_gb, *_ = row.split(" | ")
        assert float(loaded_gb) == pytest.approx(float(planned_gb), rel=0.01), name


def test_the_page_has_all_recipes() -> None:
    text = PAGE.read_text()
    assert re.findall(r"^### (\w+)$", text, re.MULTILINE) == [*APPS]
    assert all(f"| `{name}` |" in text for name in APPS)


if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"
    before = PAGE.read_text().partition(START)[0].rstrip()
    PAGE.write_text(f"{before}\n\n{START}\n\n" + "\n".join(map(section, APPS)))
