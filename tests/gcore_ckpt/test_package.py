"""The public face of the package: its names, its imports, its README."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gcore_ckpt

README = Path(__file__).parents[2] / "packages" / "gcore-ckpt" / "README.md"


def test_exports() -> None:
    assert gcore_ckpt.__all__ == [
        "CheckpointError",
        "CheckpointLockedError",
        "CheckpointMismatchError",
        "CheckpointNotFoundError",
        "CheckpointWriteError",
        "Checkpointer",
        "CorruptCheckpointError",
        "LostRankError",
        "PerRank",
        "SaveHandle",
        "Shard",
        "Shards",
        "State",
        "export_hf",
        "import_dcp",
        "load",
        "save",
        "verify",
    ]
    assert all(hasattr(gcore_ckpt, name) for name in gcore_ckpt.__all__)


def test_import_loads_nothing_heavy() -> None:
    heavy = "import sys, gcore_ckpt; print([name for name in ('torch', 'numpy', 'safetensors') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", heavy], text=True) == "[]\n"


def test_readme_example_runs_as_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = README.read_text().split("```python\n")[1].split("```")[0]
    exec(compile(example, str(README), "exec"), {"__name__": "__main__"})


def test_nothing_is_unpickled_but_where_dcp_is_imported() -> None:
    folder = Path(gcore_ckpt.__file__).parent
    unpickling = re.compile(r"\bpickle\b|\btorch\.load\b|(gather|broadcast|scatter)_object")
    assert [path.name for path in folder.rglob("*.py") if unpickling.search(path.read_text())] == ["dcp.py"]
