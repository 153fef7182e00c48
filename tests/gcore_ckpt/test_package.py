"""Rules of the package that hold for all of its files, and its optional dependencies."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import gcore_ckpt


def test_nothing_is_unpickled_but_by_imports() -> None:
    folder = Path(gcore_ckpt.__file__).parent
    unpickling = re.compile(r"\bpickle\b|\btorch\.load\b|(gather|broadcast|scatter)_object")
    files = {path.name for path in folder.rglob("*.py") if unpickling.search(path.read_text())}
    assert files == {"dcp.py", "torch_file.py"}


HIDDEN = ("tensorstore", "transformers", "accelerate", "lightning")
HIDE = f"import sys; sys.modules.update(dict.fromkeys({HIDDEN!r})); "


def test_steps_in_a_folder_need_no_extra(tmp_path: Path) -> None:
    program = f"""{HIDE}
import gcore_ckpt, torch
from gcore_ckpt.integrations.dcp import StorageWriter
gcore_ckpt.save({str(tmp_path)!r}, {{"w": torch.ones(2)}}, step=1)
gcore_ckpt.verify({str(tmp_path)!r})
print(gcore_ckpt.load({str(tmp_path)!r})["w"].tolist())
"""
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "[1.0, 1.0]\n"


@pytest.mark.parametrize(
    ("module", "extra", "use"),
    [
        (
            "tensorstore",
            "object-store",
            "from gcore_ckpt import Checkpointer; Checkpointer('s3://bucket/steps')",
        ),
        ("transformers", "transformers", "import gcore_ckpt.integrations.transformers"),
        ("accelerate", "accelerate", "import gcore_ckpt.integrations.accelerate"),
        ("lightning", "lightning", "import gcore_ckpt.integrations.lightning"),
    ],
)
def test_a_missing_extra_is_named(module: str, extra: str, use: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", HIDE + use], capture_output=True, text=True, check=False
    )
    assert found.returncode == 1
    assert found.stderr.endswith(
        f"{module!r} is not installed: pip install 'gcore-ckpt[{extra}]'\n"
    )


def test_importing_the_package_imports_no_integration() -> None:
    program = "import sys, gcore_ckpt; gcore_ckpt.Checkpointer; print(sorted(sys.modules))"
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert "gcore_ckpt.checkpointer" in loaded
    assert not [
        name for name in (*HIDDEN, "torch", "gcore_ckpt.integrations") if f"'{name}'" in loaded
    ]
