"""Count what the house rules are about, and print it in the form of `house_limits.py`.

After a change that lowers a number:
``python tests/workspace/house_measures.py > tests/workspace/house_limits.py && ruff format tests/workspace``.
"""

import ast
import json
import math
import pprint
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from density import AIMS, density
from house import (
    APPS,
    DISTRIBUTIONS,
    PACKAGES,
    Distribution,
    imports,
    parse,
    relative,
    repository_files,
)

MAX_MODULES = 12
"""Modules in a folder, without its ``__init__.py``."""
MAX_LINES = 600
"""Lines of a source file."""

PUBLIC = {p.module for p in PACKAGES} | {"gcore_rollout.rewards"}
"""Modules that apps may import from packages."""

WORDS = (
    *(
        "told",
        "foretold",
        "foretell",
        "foretells",
        "anew",
        "mend",
        "mends",
        "mended",
        "whoever",
        "somebody",
        "nobody",
    ),
    *(
        "begun",
        "goes on",
        "go on",
        "went on",
        "going on",
        "gone on",
        "beside",
        "hand out",
        "handed out",
        "hands out",
    ),
)
"""Words that this project's prose and names do without."""
DIALECT = re.compile(
    rf"(?<![a-z])(?:{'|'.join(WORDS)})(?![a-z])".replace(" ", "[ _-]"), flags=re.IGNORECASE
)

OPENERS = ("Of", "What", "Those", "Then", "Where", "Who", "How", "Whether")
"""First words of docstrings that are no sentences."""
OPENERS_OF_FIELDS = ("Of", "What", "Those", "Then", "Who")
"""The same for the string under a field or constant, where "Whether to ..." is common."""


def modules(distribution: Distribution) -> dict[str, Path]:
    """Return a distribution's files by the name of their module."""
    found: dict[str, Path] = {}
    for path in distribution.files():
        parts = path.relative_to(distribution.source.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def dependencies(distribution: Distribution) -> dict[str, set[str]]:
    """Return which modules each module imports: lazily and for types, too, and through what folders export."""
    files = modules(distribution)
    exports = {
        name: {i.name: i.module for i in imports(path)}
        for name, path in files.items()
        if path.name == "__init__.py"
    } | {distribution.module: distribution.exports()}

    def target(module: str, name: str) -> str:
        if f"{module}.{name}" in files:
            return f"{module}.{name}"
        if module in exports and name in exports[module]:
            return target(exports[module][name], name)
        return module

    graph: dict[str, set[str]] = {name: set() for name in files if name not in exports}
    for name, found in graph.items():
        for i in imports(files[name]):
            if i.top == distribution.module:
                found.add(target(i.module, i.name))
        found &= graph.keys() - {name}
    return graph


def cycles() -> list[tuple[str, ...]]:
    """Return the groups of modules that import each other, directly or through others of the group."""
    return sorted(group for d in DISTRIBUTIONS for group in _strongly_connected(dependencies(d)))


def _strongly_connected(graph: dict[str, set[str]]) -> Iterator[tuple[str, ...]]:
    reached = {name: _reachable(graph, name) for name in graph}
    groups = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in graph}
    yield from (group for group in groups if len(group) > 1)


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    pending = [start]
    while pending:
        new = graph[pending.pop()] - found
        found |= new
        pending += new
    return found


def full_folders() -> dict[str, int]:
    """Return the number of modules of each folder that has more than `MAX_MODULES`."""
    files = [path for d in DISTRIBUTIONS for path in d.files() if path.name != "__init__.py"]
    return _above(Counter(relative(path.parent) for path in files), MAX_MODULES)


def long_files() -> dict[str, int]:
    """Return the number of lines of each source file that has more than `MAX_LINES`."""
    lines = {
        relative(path): len(path.read_text().splitlines())
        for d in DISTRIBUTIONS
        for path in d.files()
    }
    return _above(lines, MAX_LINES)


def _above(counts: dict[str, int], limit: int) -> dict[str, int]:
    return {name: count for name, count in sorted(counts.items()) if count > limit}


def deep_imports() -> dict[str, list[str]]:
    """Return the modules inside packages that each app imports."""
    packages = {p.module for p in PACKAGES}
    return {
        app.name: sorted(
            {i.module for p in app.files() for i in imports(p) if i.top in packages} - PUBLIC
        )
        for app in APPS
    }


@cache
def places() -> dict[str, list[Path]]:
    """Return the sources and documents of each distribution, and the repository's own documents."""
    found: dict[str, list[Path]] = {"repository": []}
    for path in repository_files():
        owner = next((d for d in DISTRIBUTIONS if path.is_relative_to(d.folder)), None)
        is_source = owner is not None and path.suffix == ".py" and path.is_relative_to(owner.source)
        if is_source or (path.suffix == ".md" and path.name != "CHANGELOG.md"):
            found.setdefault(owner.name if owner else "repository", []).append(path)
    return found


def dialect() -> dict[str, list[str]]:
    """Return where each distribution uses one of `WORDS`."""
    return {
        name: [
            f"{relative(path)}:{number}: {match[0]}"
            for path in paths
            for number, line in enumerate(path.read_text().splitlines(), start=1)
            for match in DIALECT.finditer(line)
        ]
        for name, paths in places().items()
    }


def fragments() -> dict[str, list[str]]:
    """Return each distribution's docstrings that open with a word that begins no sentence."""
    return {
        d.name: [
            f"{relative(path)}:{line}: {text.splitlines()[0]}"
            for path in d.files()
            for line, text, openers in _docstrings(parse(path))
            if text.split(maxsplit=1)[0] in openers
        ]
        for d in DISTRIBUTIONS
    }


def without_example() -> dict[str, list[str]]:
    """Return the public types of each distribution, but errors, whose docstrings have no ``Example:``."""
    found: dict[str, list[str]] = {}
    for d in DISTRIBUTIONS:
        names = found[d.name] = []
        exports = d.exports()
        for path in d.files():
            for node in ast.walk(parse(path)):
                if not isinstance(node, ast.ClassDef) or node.name not in exports:
                    continue
                is_error = node.name.endswith("Error")
                if not is_error and "Example:" not in (ast.get_docstring(node) or ""):
                    names.append(node.name)
    return found


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for i, statement in enumerate(node.body):
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text)), lineno=line) if text.strip():
                    yield line, text, OPENERS_OF_FIELDS if i else OPENERS
                case _:
                    pass


def traced_files() -> dict[str, int]:
    """Return how many files a run touches before its first step, and in one step."""
    command = [sys.executable, Path(__file__).with_name("trace_step.py"), "--json"]
    return json.loads(subprocess.check_output(command, text=True, timeout=900))


def density_limits() -> dict[str, float]:
    """Return the figures of `density`, rounded up, but not below their aims."""
    limits: dict[str, float] = {}
    for name, figure in density().items():
        unit = 1_000 if "nodes" in name and figure > 1_000 else 0.1
        limits[name] = max(AIMS[name], round(math.ceil(figure / unit) * unit, 1))
    return limits


def limits() -> str:
    """Return the text of `house_limits.py`."""
    values = {
        "CYCLES": cycles(),
        "FULL_FOLDERS": full_folders(),
        "LONG_FILES": long_files(),
        "DEEP_IMPORTS": {name: len(found) for name, found in deep_imports().items()},
        "DIALECT": {name: len(found) for name, found in dialect().items()},
        "FRAGMENTS": {name: len(found) for name, found in fragments().items()},
        "WITHOUT_EXAMPLE": {name: len(found) for name, found in without_example().items()},
        "TRACED_FILES": traced_files(),
        "DENSITY": density_limits(),
    }
    types = {"CYCLES": "list[tuple[str, ...]]", "DENSITY": "dict[str, float]"}
    lines = [
        f"{name}: {types.get(name, 'dict[str, int]')} = {pprint.pformat(value, width=116, sort_dicts=False)}\n"
        for name, value in values.items()
    ]
    text = "".join(lines).replace("'", '"')
    title = "Where the house rules do not hold yet, as `house_measures.py` prints it. Numbers only fall."
    return f'"""{title}"""\n\n{text}'


if __name__ == "__main__":
    print(limits(), end="")
