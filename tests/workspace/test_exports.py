"""The public face of every distribution: exports, docstrings, version, changelog, README."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest
from house import DISTRIBUTIONS, PACKAGES, Distribution, fenced_blocks, parse

PUBLIC_MODULES = [p.module for p in PACKAGES]


def by_name(distribution: Distribution) -> str:
    return distribution.name


@pytest.mark.parametrize("module_name", PUBLIC_MODULES)
def test_exports_are_declared_once_and_there(module_name: str) -> None:
    module = importlib.import_module(module_name)
    declared: list[str] = module.__all__
    # Ruff sorts them (RUF022).
    assert len(declared) == len(set(declared))
    assert not [name for name in declared if not hasattr(module, name)]


@pytest.mark.parametrize("module_name", PUBLIC_MODULES)
def test_nothing_public_is_left_out_of_the_exports(module_name: str) -> None:
    module = importlib.import_module(module_name)
    assert module.__file__ is not None
    bound: set[str] = set()
    for node in ast.walk(parse(Path(module.__file__))):
        match node:
            case ast.ImportFrom(names=names) | ast.Import(names=names):
                bound |= {(alias.asname or alias.name).partition(".")[0] for alias in names}
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                bound.add(name)
            case _:
                pass
    public = {name for name in bound if not name.startswith("_")} - {"TYPE_CHECKING"}
    assert public == set(module.__all__)


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


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=by_name)
def test_the_version_is_static_and_heads_the_changelog(distribution: Distribution) -> None:
    changelog = distribution.folder / "CHANGELOG.md"
    assert changelog.is_file(), f"{distribution.name} has no CHANGELOG.md: '# Changelog', then '## VERSION'"
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
