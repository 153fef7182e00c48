"""Modules that a fork server imports may look for CUDA, and its children can still use it.

A library of two functions, which say that there are two devices, stands in for the driver's management library.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from looks_for_cuda import report

from gcore_rollout import PRELOAD_DIFFUSERS, EngineProcess, RolloutError
from gcore_rollout.engines.registry import PRELOAD_HF, PRELOAD_VLLM

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # A fork would look for CUDA in the libraries of the process that it comes from.
    pytest.mark.usefixtures("no_forks"),
]

NVML = """
int nvmlInit(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }
"""


@pytest.fixture
def library(tmp_path: Path) -> str:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler; put cc on the PATH and run it again")
    (tmp_path / "nvml.c").write_text(NVML)
    command = ["cc", "-shared", "-fPIC", "-o", tmp_path / "libnvidia-ml.so.1", tmp_path / "nvml.c"]
    subprocess.run(command, check=True)
    return str(tmp_path)


async def found_by_a_child(
    preload: tuple[str, ...], env: dict[str, str] | None = None
) -> dict[str, object]:
    with pytest.raises(RolloutError) as error:
        await EngineProcess.start(report, preload=preload, env=env)
    return json.loads(str(error.value))


@pytest.mark.parametrize(
    "modules",
    [
        (),
        ("torch.utils.cpp_extension",),
        pytest.param(PRELOAD_HF, marks=pytest.mark.slow),
        pytest.param(PRELOAD_VLLM, marks=pytest.mark.slow),
        pytest.param(PRELOAD_DIFFUSERS, marks=pytest.mark.slow),
    ],
)
async def test_children_can_use_cuda(
    monkeypatch: pytest.MonkeyPatch, library: str, modules: tuple[str, ...]
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", library)
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    preload = ("looks_for_cuda", *modules)
    expected = {
        "check before import": "1",
        "server has CUDA": True,
        "initialized": False,
        "is in bad fork": False,
        "devices": 2,
    }
    assert await found_by_a_child(preload) == expected
    # The same server: a child sees the devices that are meant for it, and not those of the server.
    assert await found_by_a_child(preload, {"CUDA_VISIBLE_DEVICES": "1"}) == expected | {
        "devices": 1
    }
