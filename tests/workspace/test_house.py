"""Import cycles, sizes of folders and files, deep imports and prose. What exists is listed and may only become less."""

import house_limits
import pytest
from density import density
from house_measures import (
    DIALECT,
    MAX_LINES,
    MAX_MODULES,
    cycles,
    deep_imports,
    dialect,
    fragments,
    full_folders,
    long_files,
    traced_files,
    without_example,
)

COMMAND = "python tests/workspace/house_measures.py > tests/workspace/house_limits.py && ruff format tests/workspace"


def test_modules_import_each_other_in_no_cycle() -> None:
    """Imports inside functions and for type checkers count, too."""
    found = cycles()
    assert [c for c in found if c not in house_limits.CYCLES] == [], "break the cycle"
    assert [c for c in house_limits.CYCLES if c not in found] == [], f"no cycle any more: {COMMAND}"


@pytest.mark.parametrize("rule", ["folders", "files"])
def test_folders_and_files_are_small(rule: str) -> None:
    found, listed, limit = {
        "folders": (full_folders(), house_limits.FULL_FOLDERS, MAX_MODULES),
        "files": (long_files(), house_limits.LONG_FILES, MAX_LINES),
    }[rule]
    larger = {name: count for name, count in found.items() if count > listed.get(name, limit)}
    assert larger == {}, f"split it by what it does: at most {limit}"
    assert [name for name in listed if name not in found] == [], f"small enough now: {COMMAND}"


def test_apps_import_packages_by_their_roots() -> None:
    for app, found in deep_imports().items():
        assert len(found) <= house_limits.DEEP_IMPORTS.get(app, 0), (
            f"{app}: export it from the root: {found}"
        )


def test_prose_is_plain() -> None:
    for name, found in dialect().items():
        assert len(found) <= house_limits.DIALECT.get(name, 0), "\n".join(found)


def test_docstrings_are_sentences() -> None:
    for name, found in fragments().items():
        assert len(found) <= house_limits.FRAGMENTS.get(name, 0), "\n".join(found)


def test_public_types_have_an_example() -> None:
    """`test_examples_in_docstrings_run` runs them."""
    for name, found in without_example().items():
        assert len(found) <= house_limits.WITHOUT_EXAMPLE.get(name, 0), f"{name}: {found}"


def test_sources_do_not_become_larger_or_denser() -> None:
    """`density.py` prints each distribution's figures."""
    found = density()
    assert found.keys() == house_limits.DENSITY.keys()
    assert {
        name: figure for name, figure in found.items() if figure > house_limits.DENSITY[name]
    } == {}


@pytest.mark.slow
def test_a_run_touches_few_files() -> None:
    """`trace_step.py --files` lists them: those before the first step of `gcore-llm train`, and those of one step."""
    found = traced_files()
    assert found.keys() == house_limits.TRACED_FILES.keys()
    assert {part: n for part, n in found.items() if n > house_limits.TRACED_FILES[part]} == {}
    assert min(found.values()) > 10, "the marks of a step are not found"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It goes on, as is told.", ["goes on", "told"]),
        ("def go_on(is_told): ...", ["go_on", "told"]),
        ("Cargo on board beholds besides stolden goods.", []),
    ],
)
def test_what_counts_as_dialect(text: str, expected: list[str]) -> None:
    assert DIALECT.findall(text) == expected
