"""The package as a reader meets it: its README runs, and importing it brings in numpy and nothing heavier."""

import re
import subprocess
import sys
from pathlib import Path

import gcore_placement

README = Path(__file__).parents[2] / "packages" / "gcore-placement" / "README.md"


def run(program: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_readme_example_runs() -> None:
    examples = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    (example,) = (text for text in examples if "balance(" in text)
    assert "slowest / mean = 1.0000" in run(example)


def test_importing_is_light() -> None:
    loaded = run(
        "import sys, gcore_placement; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    for heavy in ("torch", "transformers", "ray", "scipy", "pandas"):
        assert f"'{heavy}'" not in loaded


def test_what_is_exported_is_there() -> None:
    names = dir(gcore_placement)
    assert "balance" in names
    assert all(getattr(gcore_placement, name) for name in names)
