"""Packages and apps are built and checked, installed outside of the repository, and run there."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import numpy as np
import pytest
from bounds import PROJECTS, bounded
from house import DISTRIBUTIONS, PACKAGES, ROOT, Distribution, fenced_blocks
from safetensors.numpy import save_file

pytestmark = pytest.mark.slow

NEEDED_TO_IMPORT = "lazy-loader"
"""The only third-party distribution without which ``import gcore_x`` fails."""

WITHOUT_EXTRA = [
    (
        "ckpt",
        "object-store",
        "tensorstore",
        "import gcore_ckpt; gcore_ckpt.load('s3://bucket/steps')",
    ),
    ("controller", "ray", "ray", "import gcore_controller.runtimes.ray"),
    ("placement", "cli", "rich", "import gcore_placement.cli.tables"),
    (
        "rollout",
        "http",
        "aiohttp",
        "from gcore_rollout import HTTPReward as use; use('http://localhost')",
    ),
    (
        "rollout",
        "math-verify",
        "math_verify",
        "from gcore_rollout import build_reward as use; use('math-verify')",
    ),
    ("rollout", "diffusion", "diffusers", "import gcore_rollout.engines.diffusion.engine"),
    ("trainer", "diffusion", "diffusers", "import gcore_trainer.diffusion.denoiser"),
    ("rollout", "ray", "ray", "import gcore_rollout.engines.remote.ray_engine"),
    ("rollout", "ray", "ray", "import gcore_rollout.weight_sync.weight_references"),
    (
        "rollout",
        "reasoning-gym",
        "reasoning_gym",
        "from gcore_rollout import build_task_reward as use; use('chain_sum')",
    ),
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


def run(*command: str | Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    # PYTHONPATH could bring the sources back in, VIRTUAL_ENV the workspace's own environment.
    environment = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")
    } | variables
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def must_run(*command: str | Path, folder: Path, **variables: str) -> str:
    result = run(*command, folder=folder, **variables)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive of every package and app, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("index")
    must_run(uv(), "build", "--quiet", "--all-packages", "--out-dir", folder, folder=ROOT)
    return folder


@pytest.fixture(scope="session")
def wheels(index: Path) -> dict[str, Path]:
    """A wheel of each, by distribution."""
    return {
        d.name: next(index.glob(f"{d.module}-{d.project['version']}-*.whl")) for d in DISTRIBUTIONS
    }


@pytest.mark.parametrize("package", DISTRIBUTIONS, ids=by_name)
def test_a_wheel_holds_the_package_and_nothing_else(
    package: Distribution, wheels: dict[str, Path]
) -> None:
    wheel = zipfile.ZipFile(wheels[package.name])
    names = wheel.namelist()
    assert f"{package.module}/py.typed" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {package.module}
    assert not [name for name in names if "test" in name or "__pycache__" in name]
    [license_file] = [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
    assert wheel.read(license_file) == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("package", DISTRIBUTIONS, ids=by_name)
def test_a_source_archive_holds_what_a_wheel_is_built_from(
    package: Distribution, index: Path
) -> None:
    base = f"{package.module}-{package.project['version']}"
    with tarfile.open(index / f"{base}.tar.gz") as archive:
        names = archive.getnames()
    files = {f"{base}/{path.relative_to(package.folder).as_posix()}" for path in package.files()}
    others = {
        f"{base}/{name}"
        for name in ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "PKG-INFO")
    }
    assert (files | others) - {*names} == set()


def test_an_index_would_accept_them(index: Path) -> None:
    """Their metadata is valid, and so are the descriptions that are made from the READMEs."""
    files = [path for path in index.iterdir() if path.suffix in (".whl", ".gz")]
    assert len(files) == 2 * len(DISTRIBUTIONS)
    must_run(sys.executable, "-m", "twine", "check", "--strict", *files, folder=index)


@pytest.fixture(scope="module")
def environment(index: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with gcore-ckpt and gcore-llm out of the index, and all else in the versions of the tests."""
    folder = tmp_path_factory.mktemp("environment")
    # Not what libraries bring along in folders of their own, which they may have added to this process's path.
    installed = distributions(path=[sysconfig.get_path("purelib")])
    others = {d.name: d.version for d in installed if not d.name.startswith("gcore-")}
    (folder / "others.txt").write_text(
        "".join(f"{name}=={version}\n" for name, version in others.items())
    )
    must_run(uv(), "venv", "--quiet", "--python", sys.executable, "venv", folder=folder)
    install = (
        uv(),
        "pip",
        "install",
        "--quiet",
        "--python",
        folder / "venv",
        "--constraint",
        "others.txt",
    )
    must_run(*install, "gcore-ckpt", "gcore-llm", folder=folder, UV_FIND_LINKS=str(index))
    return folder / "venv/bin"


def test_a_package_from_the_index_runs_its_example(environment: Path, tmp_path: Path) -> None:
    text = (ROOT / "packages/gcore-ckpt/README.md").read_text()
    (example,) = (content for label, content, _ in fenced_blocks(text) if label == "python")
    assert must_run(environment / "python", "-c", example, folder=tmp_path).endswith(
        "resumed at 30\n"
    )
    assert "30" in must_run(environment / "gcore-ckpt", "ls", "checkpoints", folder=tmp_path)


def test_the_app_from_the_index_makes_a_first_run(environment: Path, tmp_path: Path) -> None:
    """One step without a warm-up, in which there may be nothing to learn from: exit code 3."""
    short = "--warmup.max-steps 0 --trainer.total-training-steps 1 --data.train-batch-size 1 --rollout.n 2"
    task = "--data.max-response-length 2 --task.num-train 16 --task.num-val 4"
    done = run(environment / "gcore-llm", "train", *short.split(), *task.split(), folder=tmp_path)
    assert done.returncode in (0, 3), done.stderr
    assert (tmp_path / "runs/default/report.html").is_file()
    assert (tmp_path / "runs/default/export/model.safetensors").is_file()


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_packages_ask_for_compatible_ones(path: Path) -> None:
    assert bounded(path.read_text()) == path.read_text(), (
        "run: uv run python scripts/release/bounds.py"
    )


@pytest.mark.parametrize("package", PACKAGES, ids=by_name)
def test_a_package_installs_alone_and_imports(
    package: Distribution, wheels: dict[str, Path], tmp_path: Path
) -> None:
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
    result = run(
        sys.executable, "-c", f"import sys; sys.modules[{module!r}] = None; {use}", folder=tmp_path
    )
    assert result.returncode == 1
    assert result.stderr.endswith(
        f"Error: {module!r} is not installed: pip install 'gcore-{package}[{extra}]'\n"
    )
