"""The constraints of a release: one version of each of its packages, and of all that they and their extras need.

``uv run python scripts/release/constraints.py`` prints them out of the lock file with which the tests ran. The
file goes with the release: users have no lock, and get the tested versions with ``-c constraints.txt``.
"""

import os
import re
import subprocess
import tomllib

from bounds import PROJECTS, ROOT

EXPORT = (
    *("export", "--frozen", "--no-header", "--no-annotate", "--no-hashes", "--no-emit-workspace"),
    *("--all-packages", "--all-extras", "--no-default-groups"),
)


def constraints() -> str:
    """Return a line for each distribution, those of the workspace first; some have another version on Python 3.11."""
    lines: list[str] = []
    for path in PROJECTS:
        project = tomllib.loads(path.read_text())["project"]
        lines.append(f"{project['name']}=={project['version']}")
    command = [os.environ.get("UV", "uv"), *EXPORT]
    exported = subprocess.check_output(command, cwd=ROOT, text=True)
    lines += re.findall(r"^[\w.-]+==.*", exported, flags=re.MULTILINE)
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    print(constraints(), end="")
