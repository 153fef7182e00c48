"""The repository as data: its distributions, its Python files, what git holds, and what a file imports."""

import ast
import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """One member of the workspace."""

    name: str
    """As pip knows it: ``gcore-ckpt``."""
    folder: Path

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        return self.folder / "src" / self.module

    @property
    def is_package(self) -> bool:
        return self.folder.parent.name == "packages"

    @property
    def project(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]

    @property
    def extras(self) -> dict[str, list[str]]:
        return self.project.get("optional-dependencies", {})

    def files(self) -> list[Path]:
        return sorted(self.source.rglob("*.py"))

    def exports(self) -> dict[str, str]:
        """Return the public names and their modules: what ``__init__.pyi`` imports, which is read when one is used."""
        stub = self.source / "__init__.pyi"
        nodes = (
            [node for node in parse(stub).body if isinstance(node, ast.ImportFrom)]
            if stub.is_file()
            else []
        )
        return {
            alias.name: f"{self.module}.{node.module}" for node in nodes for alias in node.names
        }


@dataclass(frozen=True, kw_only=True)
class Import:
    """One imported module, with the name taken from it (empty: the module itself)."""

    module: str
    name: str
    line: int

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


DISTRIBUTIONS = [
    Distribution(name=path.parent.name, folder=path.parent)
    for folder in ("packages", "apps")
    for path in sorted((ROOT / folder).glob("*/pyproject.toml"))
]
PACKAGES = [d for d in DISTRIBUTIONS if d.is_package]
APPS = [d for d in DISTRIBUTIONS if not d.is_package]
READMES = [ROOT / "README.md", *(d.folder / "README.md" for d in DISTRIBUTIONS)]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [*READMES, ROOT / "CONTRIBUTING.md", *PAGES]
"""What people read."""


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """Everything that a file imports, anywhere in it, `importlib.import_module("...")` included."""
    return tuple(_imports(parse(path)))


def _imports(tree: ast.Module) -> Iterator[Import]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(module=alias.name, name="", line=node.lineno)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                for alias in names:
                    yield Import(module=module, name=alias.name, line=node.lineno)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield Import(module=module, name="", line=node.lineno)
            case _:
                pass


@cache
def repository_files() -> tuple[Path, ...]:
    """What git holds, or would once everything is added."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.check_output(command, cwd=ROOT, text=True)
    paths = (ROOT / name for name in listed.split("\0") if name)
    return tuple(sorted(p for p in set(paths) if p.is_file()))


@cache
def text_files() -> tuple[tuple[Path, str], ...]:
    """Every text file of the repository with its content."""
    found: list[tuple[Path, str]] = []
    for path in repository_files():
        try:
            found.append((path, path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return tuple(found)


def fenced_blocks(text: str) -> list[tuple[str, str, int]]:
    """Label, content and first line number of each fenced block of a Markdown text."""
    return [
        (match["label"], match["content"], text.count("\n", 0, match.start("content")) + 1)
        for match in re.finditer(
            r"^ *```(?P<label>\w*)[^\n]*\n(?P<content>.*?)^ *```\s*?$",
            text,
            flags=re.DOTALL | re.MULTILINE,
        )
    ]


def names_of_tests(path: Path) -> set[str]:
    """Functions of a test file whose names start with ``test``."""
    functions = (
        node
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {f.name for f in functions if f.name.startswith("test")}
