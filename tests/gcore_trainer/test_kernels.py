"""The tests of Triton's kernels, by its interpreter, which a process chooses before it imports Triton."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "interpreted_kernels.py"


@pytest.mark.slow
def test_kernels_give_what_torchs_operations_do() -> None:
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", str(CASES)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout[-8000:] + finished.stderr[-2000:]
    assert " passed" in finished.stdout
