"""The page of algorithms is what the script prints, which computes each loss and estimator here and by verl."""

import subprocess
import sys

import pytest
from algorithms_page import FORMULAS, IMAGE_FORMULAS, PAGE
from house import ROOT

pytestmark = pytest.mark.slow


def test_the_page_is_up_to_date() -> None:
    script = ROOT / "scripts/docs/algorithms_page.py"
    printed = subprocess.check_output([sys.executable, script, "--print"], text=True, cwd=ROOT)
    assert printed == PAGE.read_text(), "run: uv run python scripts/docs/algorithms_page.py"


def test_the_tests_of_formulas_are_there() -> None:
    for test, _ in FORMULAS.values():
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text()
    for name in IMAGE_FORMULAS.values():
        tests = ROOT / "tests/gcore_trainer/test_diffusion_losses.py"
        assert f"def test_{name}(" in tests.read_text()
