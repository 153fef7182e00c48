"""Every package is built, installed alone outside the repository, and imported without its heavy dependencies."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from house import PACKAGES, Distribution
from safetensors.numpy import save_file

pytestmark = pytest.mark.slow

NEEDED_TO_IMPORT = "lazy-loader"
"""The only third-party distribution without which ``import gcore_x`` fails."""

WITHOUT_EXTRA = [
    ("ckpt", "object-store", "tensorstore", "import gcore_ckpt; gcore_ckpt.load('s3://bucket/steps')"),
    ("controller", "ray", "ray", "import gcore_controller.runtimes.ray"),
    ("placement", "cli", "rich", "import gcore_placement.cli.tables"),
    ("rollout", "http", "aiohttp", "from gcore_rollout import HTTPReward as use; use('http://localhost')"),
    ("rollout", "math-verify", "math_verify", "from gcore_rollout import MathVerifyReward as use; use()"),
    ("rollout", "diffusion", "diffusers", "import gcore_rollout.engines.diffusion.engine"),
    ("trainer", "diffusion", "diffusers", "import gcore_trainer.diffusion.denoiser"),
    ("rollout", "ray", "ray", "import gcore_rollout.engines.remote.ray_engine"),
    ("rollout", "ray", "ray", "import gcore_rollout.weight_sync.weight_references"),
    ("rollout", "reasoning-gym", "reasoning_gym", "from gcore_rollout import ReasoningGymReward as use; use()"),
    (
        "rollout",
        "vllm",
        "vllm",
        "from gcore_rollout.engines.vllm.engine import VLLMEngine; VLLMEngine.from_pretrained('model')",
    ),
]
"""Package and extra, the module to hide, and what then fails."""


def by_name(package: Distribution) -> str:
    return package.name


def uv() -> str:
    """The uv that runs these tests, or the one on the path."""
    found = os.environ.get("UV") or shutil.which("uv")
    assert found, "uv is not installed: pip install uv"
    return found


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    # PYTHONPATH could bring the sources back in, VIRTUAL_ENV the workspace's own environment.
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


def must_run(*command: str | Path, folder: Path) -> str:
    result = run(*command, folder=folder)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel of each package, by distribution."""
    folder = tmp_path_factory.mktemp("wheels")
    for package in PACKAGES:
        must_run(uv(), "build", "--quiet", "--wheel", "--out-dir", folder, package.folder, folder=folder)
    return {p.name: next(folder.glob(f"{p.module}-{p.project['version']}-*.whl")) for p in PACKAGES}


@pytest.mark.parametrize("package", PACKAGES, ids=by_name)
def test_a_wheel_holds_the_package_and_nothing_else(package: Distribution, wheels: dict[str, Path]) -> None:
    names = zipfile.ZipFile(wheels[package.name]).namelist()
    assert f"{package.module}/py.typed" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {package.module}
    assert not [name for name in names if "test" in name or "__pycache__" in name]


@pytest.mark.parametrize("package", PACKAGES, ids=by_name)
def test_a_package_installs_alone_and_imports(package: Distribution, wheels: dict[str, Path], tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    must_run(uv(), "venv", "--quiet", "--python", sys.executable, "venv", folder=tmp_path)
    install = (uv(), "pip", "install", "--quiet", "--python", python)
    must_run(*install, "--no-deps", wheels[package.name], folder=tmp_path)
    must_run(*install, NEEDED_TO_IMPORT, folder=tmp_path)
    program = f"import {package.module} as m, importlib.util as u; print(m.__file__, u.find_spec('torch'))"
    place, torch = must_run(python, "-W", "error", "-c", program, folder=tmp_path).split()
    assert Path(place).is_relative_to(tmp_path)
    assert torch == "None"


@pytest.mark.parametrize(("package", "extra", "module", "use"), WITHOUT_EXTRA)
def test_a_missing_extra_says_how_to_install_it(
    package: str, extra: str, module: str, use: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    save_file({"weight": np.zeros(1)}, model / "model.safetensors")
    result = run(sys.executable, "-c", f"import sys; sys.modules[{module!r}] = None; {use}", folder=tmp_path)
    assert result.returncode == 1
    assert result.stderr.endswith(
        f"MissingExtraError: {module!r} is not installed: pip install 'gcore-{package}[{extra}]'\n"
    )
