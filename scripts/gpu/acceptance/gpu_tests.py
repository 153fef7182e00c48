"""Part 1: the tests of ``tests/gpu``, and on a GPU the others that need one."""

import io
import sys
import xml.etree.ElementTree as ElementTree
from contextlib import redirect_stdout

import pytest

from acceptance.machine import ROOT
from acceptance.trial import Trial

_ELSEWHERE = (
    "tests/gcore_ckpt/test_round_trip.py",
    "tests/gcore_rollout/test_weight_sync_cuda_ipc.py",
    "tests/gcore_trainer/test_token_scores.py",
)
"""Other files with tests that need a GPU."""
_QUICK = ("tests/gpu/test_head.py", "tests/gpu/test_memory.py")
"""Files of a small run on a CPU; the suite of the repository runs all of them there."""
_SETTINGS = """\
[pytest]
asyncio_mode = auto
asyncio_default_fixture_loop_scope = function
markers =
    slow: takes long
    gpu: needs a CUDA device
"""
"""Not those of the repository: a bare image lacks plugins that these name, and its warnings are not ours."""


def run_tests(trial: Trial) -> None:
    """Run the tests that need the device, or on a CPU the others that are not slow; few of them in a small run."""
    settings, results = trial.work / "pytest.ini", trial.work / "tests.xml"
    settings.write_text(_SETTINGS)
    on_gpu = trial.device.startswith("cuda")
    chosen = ["-m", "gpu" if on_gpu else "not gpu and not slow"]
    paths = ("tests/gpu",)
    if on_gpu:
        paths = ("tests/gpu", *_ELSEWHERE)
    elif trial.is_small:
        paths = _QUICK
    chosen += [str(ROOT / path) for path in paths]
    options = [
        "--import-mode=importlib",
        "-ra",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        f"--junitxml={results}",
    ]
    sys.path += [str(ROOT / "tests" / folder) for folder in ("ranks", "apps", "startup")]
    output = io.StringIO()
    with redirect_stdout(output):
        code = pytest.main(["-c", str(settings), f"--rootdir={ROOT}", *options, *chosen])
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
