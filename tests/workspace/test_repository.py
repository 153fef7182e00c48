"""What the repository may hold. Patterns are spelled so that they do not match this file."""

import ast
import hashlib
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from house import ROOT, parse, relative, repository_files, text_files

FORBIDDEN = {
    "a package registry": r"pyp[i]\.org|pythonhoste[d]|(?:extra-)?index-ur[l]|find-link[s]|PIP_INDE[X]|UV_INDE[X]",
    "a path of one machine": r"(?<![\w.~}$-])/(?:home|root|Users|work|opt|mnt|workspace)/[\w.-]+",
    "an unfinished thought": r"\b(?:TOD[O]|FIXM[E]|XX[X]|HAC[K])\b",
    "a process killed by name": r"\b(?:pkil[l]|killal[l])\b",
    "an ignored type error without its rule": r"# *(?:type|pyright): ignor[e](?!\[[\w, -]+\])",
    "an ignored lint without its rule": r"# *noq[a](?!: [A-Z]+\d+)",
    "a merge conflict": r"^(?:<{7}|>{7}) ",
}

LICENSE_SHA256 = "c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4"
"""The official LICENSE-2.0.txt, without the blank line it begins with."""

REGISTRY_VARIABLES = [
    f"{tool}_{name}" for tool in ("PIP", "UV") for name in ("INDEX_URL", "EXTRA_INDEX_URL", "INDEX")
]

MARKS_WITH_A_REASON = {"skip", "skipif", "xfail"}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds(what: str) -> None:
    pattern = re.compile(FORBIDDEN[what], re.MULTILINE)
    found = [
        f"{relative(path)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for path, text in text_files()
        for match in pattern.finditer(text)
    ]
    assert not found


def test_no_file_names_this_machine() -> None:
    """Its registry, if the environment names one, the home of who runs this, and where the clone lies."""
    urls = [os.environ.get(name, "") for name in [*REGISTRY_VARIABLES, "UV_DEFAULT_INDEX"]]
    hosts = {urlsplit(url).hostname for value in urls for url in value.split()} - {None}
    home = {f"{Path.home()}/"} - {"//"}
    names = {*filter(None, hosts), *home, f"{ROOT}/"}
    assert not [
        f"{relative(path)} names {name}"
        for path, text in text_files()
        for name in names
        if name in text
    ]


def test_the_lock_file_is_not_tracked() -> None:
    """It would name the registry that made it; bounds and `exclude-newer` in pyproject.toml make it again."""
    assert not subprocess.check_output(["git", "ls-files", "uv.lock"], cwd=ROOT)


def test_the_license_is_apache_2_in_full() -> None:
    assert hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest() == LICENSE_SHA256


def test_a_skipped_test_says_why() -> None:
    tests = [
        p for p in repository_files() if p.suffix == ".py" and relative(p).startswith("tests/")
    ]
    silent = [
        f"{relative(path)}:{line}" for path in tests for line in skips_without_a_reason(parse(path))
    ]
    assert not silent


def skips_without_a_reason(tree: ast.Module) -> Iterator[int]:
    """Lines of `pytest.skip`, `pytest.xfail` and their marks that hold no text."""
    explained: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            reasons = [k.value for k in node.keywords if k.arg == "reason"]
            is_mark = isinstance(node.func, ast.Attribute) and "mark" in ast.unparse(
                node.func.value
            ).split(".")
            if not is_mark:
                reasons += node.args[:1]
            if any(not isinstance(reason, ast.Constant) or reason.value for reason in reasons):
                explained.add(id(node.func))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in MARKS_WITH_A_REASON
            and ast.unparse(node.value) in ("pytest", "pytest.mark")
            and id(node) not in explained
        ):
            yield node.lineno


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        ("pytest.skip()", [1]),
        ("pytest.skip('needs two devices')", []),
        ("@pytest.mark.skip\ndef test(): ...", [1]),
        ("@pytest.mark.skipif(True)\ndef test(): ...", [1]),
        ("@pytest.mark.skipif(True, reason='')\ndef test(): ...", [1]),
        ("@pytest.mark.xfail(reason='upstream bug 1')\ndef test(): ...", []),
    ],
)
def test_what_counts_as_a_reason(code: str, lines: list[int]) -> None:
    assert list(skips_without_a_reason(ast.parse(code))) == lines


def test_the_ci_script_can_be_run() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    lines = script.read_text().splitlines()
    assert "step uv run pytest" in lines
    assert lines[-1] == "uv run pytest -m slow --durations=30", "the tests' own line comes last"


def test_every_test_is_run_by_one_of_two_commands() -> None:
    """`pytest` leaves out what is marked slow, and `pytest -m slow`, which fails if it selects nothing, has enough."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert options["addopts"].endswith(" -m 'not slow'")
    slow = [
        path
        for path, text in text_files()
        if path.name.startswith("test_") and "pytest.mark.slow" in text
    ]
    assert len(slow) > 40


def test_files_that_are_run_first_exist() -> None:
    names = re.findall(r'"([\w/]+/test_\w+\.py)"', (ROOT / "tests/conftest.py").read_text())
    assert len(names) > 5
    assert [name for name in names if not (ROOT / "tests" / name).is_file()] == []
