"""Part 1: the tests of ``tests/gpu``."""

import io
import xml.etree.ElementTree as ElementTree
from contextlib import redirect_stdout

import pytest

from acceptance.machine import ROOT
from acceptance.trial import Trial

_SETTINGS = """\
[pytest]
markers =
    slow: takes long
    gpu: needs a CUDA device
"""
"""Not those of the repository: a bare image lacks plugins that these name, and its warnings are not ours."""


def run_tests(trial: Trial) -> None:
    """Run the tests that need the device, or on a CPU the others; a small run leaves out those marked slow."""
    settings, results = trial.work / "pytest.ini", trial.work / "tests.xml"
    settings.write_text(_SETTINGS)
    chosen = "gpu" if trial.device.startswith("cuda") else "not gpu and not slow"
    options = ["--import-mode=importlib", "-ra", "--tb=short", "-p", "no:cacheprovider", f"--junitxml={results}"]
    output = io.StringIO()
    with redirect_stdout(output):
        code = pytest.main(["-c", str(settings), f"--rootdir={ROOT}", *options, "-m", chosen, str(ROOT / "tests/gpu")])
    print(text := output.getvalue())
    if not results.is_file():
        raise RuntimeError(f"pytest ended with exit code {code}: {text}")
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.parse(results).iter("testsuite"):
        for name in counts:
            counts[name] += int(suite.get(name, "0"))
    trial.count("tests", counts["tests"])
    trial.count("failed", counts["failures"] + counts["errors"], at_most=0)
    trial.count("skipped", counts["skipped"])
    if code:
        _, _, summary = text.rpartition("short test summary info")
        trial.error(summary or text)
