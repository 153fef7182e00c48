"""The package as a reader meets it: its README runs, and importing it brings in numpy and nothing heavier."""

import re
import subprocess
import sys
from pathlib import Path

import gcore_trainer

README = Path(__file__).parents[2] / "packages" / "gcore-trainer" / "README.md"


def run(program: str, folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False, cwd=folder
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_readme_example_learns(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    probabilities = [float(p) for p in re.findall(r"probability of a good token (\S+)", run(example, tmp_path))]
    assert probabilities[-1] > 3 * probabilities[0]


def test_importing_is_light(tmp_path: Path) -> None:
    loaded = run("import sys, gcore_trainer; print(sorted({name.partition('.')[0] for name in sys.modules}))", tmp_path)
    for heavy in ("torch", "transformers", "safetensors", "trl"):
        assert f"'{heavy}'" not in loaded


def test_what_is_exported_is_there() -> None:
    assert sorted(gcore_trainer.__all__) == gcore_trainer.__all__
    for name in gcore_trainer.__all__:
        assert getattr(gcore_trainer, name)
