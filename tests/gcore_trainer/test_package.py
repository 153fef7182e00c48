"""The README's example learns."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "packages" / "gcore-trainer" / "README.md"


def run(program: str, folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=folder,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_readme_example_learns(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    probabilities = [
        float(p) for p in re.findall(r"probability of a good token (\S+)", run(example, tmp_path))
    ]
    assert probabilities[-1] > 3 * probabilities[0]
