"""CONTRIBUTING.md, docs/ and the READMEs lead to what exists, and name a change's one file."""

import re
from pathlib import Path

import pytest
from house import DISTRIBUTIONS, DOCUMENTS, PAGES, ROOT, relative

NOT_HERE = ("runs/default/", "src/gcore_x/")
"""Paths of a run, and of a package to come."""
CHANGES = (
    "policy loss",
    "loss of image models",
    "advantage estimator",
    "engine",
    "API of agents",
    "reward kind",
    "placement strategy",
    "checkpoint backend",
    "metric of sampling or a step",
    "setting",
    "runtime",
    "modality",
)


def bases(document: Path) -> list[Path]:
    """Folders that paths may be relative to: the repository, a distribution, its sources, and tests."""
    folders = [ROOT, document.parent, ROOT / "tests/workspace"]
    for each in DISTRIBUTIONS:
        folders.append(each.source.parent)
        if each.folder == document.parent or document in PAGES:
            folders += [each.source, *(path for path in each.source.iterdir() if path.is_dir())]
    return folders


def exists(path: str, document: Path) -> bool:
    """Whether a path, or for a new file its folder, is there."""
    if "gcore-NAME" in path:
        return exists(path.replace("NAME", "llm"), document)
    known = path.partition("NAME")[0] or path
    return any((folder / known).exists() for folder in bases(document))


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_paths_that_are_named_exist(document: Path) -> None:
    prose = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    named = re.findall(r"`([\w.-]+/[\w./-]*(?:\.py|\.md|/))`", prose)
    assert [path for path in named if path not in NOT_HERE and not exists(path, document)] == []


def anchors(document: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub and MkDocs make them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_links_lead_somewhere(document: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", document.read_text(), flags=re.DOTALL)
    links = [
        target.partition("#")
        for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", prose)
        if "://" not in target
    ]
    for path, _, anchor in links:
        target = document.parent / path if path else document
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def test_the_index_leads_to_every_page() -> None:
    """Directly, or by a page that it leads to."""
    reached, new = set[Path](), {ROOT / "docs/index.md"}
    while new:
        reached |= new
        links = {
            (p, link) for p in new for link in re.findall(r"\]\(([^)#\s]+\.md)", p.read_text())
        }
        new = {(page.parent / link).resolve() for page, link in links} & set(PAGES) - reached
    assert set(PAGES) - reached == set()


def test_each_change_has_one_file_and_an_example() -> None:
    table = (
        (ROOT / "CONTRIBUTING.md")
        .read_text()
        .partition("## Where does my change go")[2]
        .partition("\n## ")[0]
    )
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][
        1:
    ]
    assert [change for change, *_ in rows] == list(CHANGES)
    for change, files, _, example in rows:
        assert files.count("`") == (4 if change == "placement strategy" else 2)
        assert (ROOT / example.strip("`")).is_file()


def test_eight_files_are_read_in_order() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| (\d+) \| \[`(.+?)`\]\((.+?)\) \|", text, flags=re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 9))
    assert all(target.endswith(path) for _, path, target in rows)
    files = [(ROOT / "docs" / target).resolve() for _, _, target in rows]
    assert sum(len(file.read_text().splitlines()) for file in files) < 3700
    assert len(text.splitlines()) <= 80


def test_every_module_that_asks_for_cuda_names_its_tests() -> None:
    """But benchmarks, whose device is a user's choice, and the conversion of verl's settings, which only names it."""
    page = (ROOT / "docs/on-one-gpu.md").read_text()
    sources = [each.source for each in DISTRIBUTIONS if each.source.name != "gcore_bench"]
    modules = [
        path
        for source in sources
        for path in source.rglob("*.py")
        if path.parent.name != "migration"
    ]
    asks = re.compile(r'torch\.(cuda|accelerator)\.|"cuda|is_cuda')
    found = [path for path in modules if asks.search(path.read_text())]
    assert len(found) > 30
    missing = [path.name for path in found if f"{path.parent.name}/{path.name}`" not in page]
    assert missing == []


def test_pictures_are_small_and_shown() -> None:
    text = "".join(document.read_text() for document in DOCUMENTS)
    pictures = sorted((ROOT / "docs").rglob("*.png"))
    assert pictures
    assert [
        path.name
        for path in pictures
        if path.stat().st_size > 150_000 or f"/{path.name})" not in text
    ] == []
