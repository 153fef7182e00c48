"""Modules that the fork server of training ranks imports may look for CUDA, and the ranks can still use it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NVML = """
int nvmlInit(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }
"""
"""Stands in for the driver's management library: there are two devices."""


@pytest.mark.slow
@pytest.mark.usefixtures("no_forks")
@pytest.mark.parametrize("own", [None, "0"])
def test_ranks_can_use_cuda(tmp_path: Path, own: str | None) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler; put cc on the PATH and run it again")
    (tmp_path / "nvml.c").write_text(NVML)
    command = ["cc", "-shared", "-fPIC", "-o", tmp_path / "libnvidia-ml.so.1", tmp_path / "nvml.c"]
    subprocess.run(command, check=True)
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTORCH_NVML_BASED_CUDA_CHECK"
    }
    environment |= {"LD_LIBRARY_PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "1"}
    if own is not None:
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = own
    program = Path(__file__).with_name("ranks_that_look_for_cuda.py")
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "rank": {
            "check before import": "1",
            "server has CUDA": True,
            "initialized": False,
            "is in bad fork": False,
            "devices": 1,
            "device": "cpu",
        },
        # The environment of this process is as it was.
        "here": own,
    }
