"""A rule of the package that holds for all of its files."""

import re
from pathlib import Path

import gcore_ckpt


def test_nothing_is_unpickled_but_where_dcp_is_imported() -> None:
    folder = Path(gcore_ckpt.__file__).parent
    unpickling = re.compile(r"\bpickle\b|\btorch\.load\b|(gather|broadcast|scatter)_object")
    assert [path.name for path in folder.rglob("*.py") if unpickling.search(path.read_text())] == ["dcp.py"]
