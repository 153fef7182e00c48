"""The packages that gcore needs and a CUDA image may lack: downloaded into a folder here, installed from it there.

An image is taken to have `IMAGE`. The others are the dependencies that the workspace's packages declare, and theirs in
turn, in the versions of the environment that makes the folder.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from acceptance.machine import ROOT

IMAGE = (
    "torch",
    "transformers",
    "safetensors",
    "tokenizers",
    "tensorstore",
    "peft",
    "rich",
    "pyarrow",
    "pytest",
    "pytest-xdist",
    "hypothesis",
)
"""Distributions that the image has, with all that they depend on here, but for `NOT_IN_IMAGE`."""
NOT_IN_IMAGE = ("pydantic",)
"""Dependencies of `IMAGE` in some versions that the image's may not have."""
FURTHER = ("pytest-asyncio", "megatron-core")
"""What tests and parts need, and no project declares but as an extra."""
NOT_USED = ("reasoning-gym", "math-verify", "gcore-bench")
"""Declared, but no part of the acceptance run imports them."""


class WheelError(Exception):
    """Wheels could not be downloaded or installed."""


def needed() -> dict[str, str]:
    """Return the distributions to be downloaded, and their versions.

    Raises:
        WheelError: this environment lacks one of them.
    """
    own = {
        path.parent.name: path
        for folder in ("packages", "apps")
        for path in (ROOT / folder).glob("*/pyproject.toml")
    }
    declared = {
        name
        for path in own.values()
        if path.parent.name not in NOT_USED
        for name in _declared(path)
    }
    roots = declared.union(FURTHER) - own.keys() - set(NOT_USED)
    image = _closure(IMAGE).keys() - _closure(NOT_IN_IMAGE).keys()
    found = {name: at for name, at in _closure(roots).items() if name not in image}
    if absent := [name for name, at in found.items() if not at]:
        raise WheelError(
            f"this environment lacks {', '.join(absent)}; expected that of the workspace (uv sync)"
        )
    return dict(sorted(found.items()))


def _declared(project: Path) -> list[str]:
    """Return the names of a project's dependencies, extras left out."""
    dependencies: list[str] = tomllib.loads(project.read_text())["project"]["dependencies"]
    return [_name(line) for line in dependencies]


def _name(requirement: str) -> str:
    """Return the normalized name of a requirement."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def _closure(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of distributions and of all that they need, by name; empty for one that is not installed."""
    from packaging.requirements import Requirement

    found: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            found[name] = version(name)
            lines = requires(name) or []
        except PackageNotFoundError:
            found[name] = ""
            continue
        requirements = map(Requirement, lines)
        waiting += [
            _name(r.name)
            for r in requirements
            if r.marker is None or r.marker.evaluate({"extra": ""})
        ]
    return found


def download(folder: Path, *, python: str) -> list[str]:
    """Download the wheels of `needed` for a version of Python, such as 3.12; return their names.

    Raises:
        WheelError: there is no pip, or it failed.
    """
    wanted = [f"{name}=={at}" for name, at in needed().items()]
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        python,
        "--dest",
        str(folder),
    ]
    _run([*_pip(), "download", *options, *wanted])
    return sorted(path.name for path in folder.glob("*.whl"))


def install(folder: Path, target: Path) -> list[str]:
    """Install from a folder of wheels what this Python lacks into a folder of its own; return the names.

    Raises:
        WheelError: the folder has no wheels, or pip failed.
    """
    names = sorted({_name(path.name.partition("-")[0]) for path in folder.glob("*.whl")})
    if not names:
        raise WheelError(
            f"--wheels is {folder}; expected a folder of wheels, which --make-wheels makes"
        )
    absent = [name for name in names if not _is_installed(name)]
    if absent:
        options = [
            "--no-index",
            "--no-deps",
            "--upgrade",
            "-f",
            str(folder),
            "--target",
            str(target),
        ]
        _run([*_pip(), "install", *options, *absent])
    return absent


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if found := shutil.which("pip"):
        return [found]
    raise WheelError("there is no pip; expected one for wheels, such as that of ensurepip")


def _run(command: list[str]) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise WheelError(
            f"{' '.join(command[:4])} failed: {finished.stdout[-500:]}{finished.stderr[-2000:]}"
        )
