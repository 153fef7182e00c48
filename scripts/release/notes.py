"""Release notes, from the changelogs of all packages and apps.

``uv run python scripts/release/notes.py`` prints the newest entry of each; with a git reference, such as the tag of the
last release, all entries that are not there.
"""

import argparse
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHANGELOGS = sorted([*ROOT.glob("packages/*/CHANGELOG.md"), *ROOT.glob("apps/*/CHANGELOG.md")])


def entries(changelog: str) -> dict[str, str]:
    """Return the text of each version, the newest first."""
    parts = re.split(r"^## (\S+)\n", changelog, flags=re.MULTILINE)[1:]
    return {version: text.strip() for version, text in zip(parts[::2], parts[1::2], strict=True)}


def notes(now: Mapping[str, str], before: Mapping[str, str] | None = None) -> str:
    """Return the notes from the changelogs by package: what is not in those of before, or the newest entries."""
    found: list[str] = []
    for name, changelog in now.items():
        versions = entries(changelog)
        known = list(versions)[1:] if before is None else entries(before.get(name, ""))
        found += [
            f"## {name} {version}\n\n{text}"
            for version, text in versions.items()
            if version not in known
        ]
    return "\n\n".join(found)


def at(reference: str, path: Path) -> str:
    """Return a changelog as it was, empty where it was not there."""
    command = ["git", "show", f"{reference}:{path.relative_to(ROOT).as_posix()}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print release notes.")
    parser.add_argument(
        "since", nargs="?", help="git reference; by default, the entry before the newest of each"
    )
    since = parser.parse_args().since
    if since:
        subprocess.run(
            ["git", "rev-parse", "--verify", since], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
    before = {path.parent.name: at(since, path) for path in CHANGELOGS} if since else None
    print(notes({path.parent.name: path.read_text() for path in CHANGELOGS}, before))
