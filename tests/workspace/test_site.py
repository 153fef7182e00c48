"""The documentation builds without a warning, and can be read from a disk without a network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from house import PAGES, ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `mkdocs build --strict` makes it."""
    folder = tmp_path_factory.mktemp("docs") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    pages = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in PAGES]
    assert [page for page in pages if not (site / page).is_file()] == []


def test_public_names_have_an_entry(site: Path) -> None:
    text = (site / "reference/api/gcore_ckpt.html").read_text()
    assert 'id="gcore_ckpt.checkpointer.Checkpointer.save"' in text
    assert "After each commit, delete the lowest committed steps" in text


def test_nothing_is_fetched_from_a_network(site: Path) -> None:
    fetched = re.compile(
        r'<(?:script|link|img|iframe)[^>]+(?:src|href)="((?:https?:)?//[^"]+)|@import|url\(["\']?https?:'
    )
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    assert len(files) > len(PAGES)
    assert [
        (path.name, found[0]) for path in files if (found := fetched.search(path.read_text()))
    ] == []


def test_links_lead_somewhere(site: Path) -> None:
    """In the site, or from its place in the repository to a file of that."""
    lost: list[str] = []
    for page in {*site.rglob("*.html")} - {site / "404.html"}:
        for target in re.findall(r'<a[^>]+href="([^"#?:]+)[^":]*"', page.read_text()):
            path = Path(os.path.normpath(page.parent / target))
            path = path if path.is_relative_to(site) else ROOT / path.relative_to(site.parent)
            if not path.exists():
                lost.append(f"{page.relative_to(site)}: {target}")
    assert lost == []


def test_search_has_its_words_and_its_worker(site: Path) -> None:
    """For pages that are opened as files, both are scripts."""
    assert "one_step_off" in (site / "search/search_index.js").read_text()
    assert '<script src="assets/iframe-worker.js">' in (site / "index.html").read_text()
