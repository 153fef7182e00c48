"""The public face of every distribution: exports, docstrings, version, changelog, README."""

import doctest
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from house import DISTRIBUTIONS, PACKAGES, Distribution, fenced_blocks

from gcore_llm.tiny_model import make_tiny_model

PUBLIC_MODULES = [p.module for p in PACKAGES]


def by_name(distribution: Distribution) -> str:
    return distribution.name


@pytest.mark.parametrize(
    "distribution", [d for d in DISTRIBUTIONS if d.is_package or d.exports()], ids=by_name
)
def test_the_stub_is_the_public_face(distribution: Distribution) -> None:
    module = importlib.import_module(distribution.module)
    assert sorted(module.__all__) == sorted(distribution.exports())
    assert not [name for name in module.__all__ if not hasattr(module, name)]
    assert not [
        name for name in vars(module) if not name.startswith("_") and not _is_exported(module, name)
    ]


def _is_exported(module: ModuleType, name: str) -> bool:
    """Submodules are bound to their package when they are imported."""
    return name in module.__all__ or isinstance(getattr(module, name), ModuleType)


@pytest.mark.parametrize("module_name", PUBLIC_MODULES)
def test_every_exported_function_and_class_says_what_it_is(module_name: str) -> None:
    module = importlib.import_module(module_name)
    exported = {name: getattr(module, name) for name in module.__all__}
    silent = [
        name
        for name, value in exported.items()
        if (inspect.isclass(value) or inspect.isfunction(value))
        # A dataclass without a docstring is given its signature as one.
        and (not value.__doc__ or value.__doc__.startswith(f"{name}("))
    ]
    assert not silent


@pytest.mark.filterwarnings("default")  # of the libraries that examples use
@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=by_name)
def test_examples_in_docstrings_run(
    distribution: Distribution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder with a tiny ``model``; numpy, torch, the module's and the public names need no import."""
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "model", seed=0)
    root = importlib.import_module(distribution.module)
    names = {name: getattr(root, name) for name in distribution.exports()}
    names |= {"np": np, "torch": torch}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    printed: list[str] = []
    for path in distribution.files():
        text = path.read_text()
        if ">>> " not in text:
            continue
        assert "+SKIP" not in text, f"{path}: an example that is not run"
        parts = path.relative_to(distribution.source.parent).with_suffix("").parts
        module = importlib.import_module(".".join(parts))
        for example in doctest.DocTestFinder().find(module, extraglobs=names):
            runner.run(example, out=printed.append)
    assert runner.failures == 0, "".join(printed)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=by_name)
def test_the_version_is_static_and_heads_the_changelog(distribution: Distribution) -> None:
    changelog = distribution.folder / "CHANGELOG.md"
    assert changelog.is_file(), (
        f"{distribution.name} has no CHANGELOG.md: '# Changelog', then '## VERSION'"
    )
    entries = re.findall(r"^## (\S+)", changelog.read_text(), flags=re.MULTILINE)
    assert entries[:1] == [distribution.project["version"]]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=by_name)
def test_it_is_typed_and_licensed(distribution: Distribution) -> None:
    assert (distribution.source / "py.typed").is_file()
    assert distribution.project["license"] == "Apache-2.0"


@pytest.mark.parametrize("package", PACKAGES, ids=by_name)
def test_a_package_has_a_readme_with_an_example(package: Distribution) -> None:
    text = (package.folder / "README.md").read_text()
    assert text.startswith(f"# {package.name}\n")
    assert "python" in {label for label, _, _ in fenced_blocks(text)}
