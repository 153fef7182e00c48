"""Bounds of the workspace's packages on each other: the versions that are compatible with those here.

``uv run python scripts/release/bounds.py`` writes them after a version has changed; a test holds that they are right.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECTS = sorted([*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("apps/*/pyproject.toml")])


def compatible(version: str) -> str:
    """Return the range from a version's series on: before 1.0 a breaking change raises the second number."""
    major, minor, _ = (int(part) for part in version.split("."))
    end = f"{major + 1}" if major else f"0.{minor + 1}"
    return f">={major}.{minor},<{end}"


def bounded(text: str) -> str:
    """Return a pyproject.toml whose dependencies on packages of the workspace have their bounds."""
    versions = {
        each["name"]: each["version"]
        for each in (tomllib.loads(p.read_text())["project"] for p in PROJECTS)
    }

    def one(match: re.Match[str]) -> str:
        return f'"{match[1]}{match[2] or ""}{compatible(versions[match[1]])}"'

    dependencies = re.compile(r"^dependencies = \[.*?^\]", flags=re.DOTALL | re.MULTILINE)
    each = re.compile(rf'"({"|".join(versions)})(\[[\w,-]+\])?[\d.,<>=]*"')
    return dependencies.sub(lambda found: each.sub(one, found[0]), text)


if __name__ == "__main__":
    for path in PROJECTS:
        path.write_text(bounded(path.read_text()))
