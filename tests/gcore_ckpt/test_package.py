"""Rules of the package that hold for all of its files, and its optional dependencies."""

import re
import subprocess
import sys
from pathlib import Path

import gcore_ckpt


def test_nothing_is_unpickled_but_by_imports() -> None:
    folder = Path(gcore_ckpt.__file__).parent
    unpickling = re.compile(r"\bpickle\b|\btorch\.load\b|(gather|broadcast|scatter)_object")
    files = {path.name for path in folder.rglob("*.py") if unpickling.search(path.read_text())}
    assert files == {"dcp.py", "torch_file.py"}


HIDDEN = ("tensorstore", "transformers", "accelerate", "lightning")
WITHOUT_EXTRAS = f"""
import sys
sys.modules.update(dict.fromkeys({HIDDEN!r}))
import gcore_ckpt, torch
from gcore_ckpt.integrations.dcp import StorageWriter
gcore_ckpt.save("steps", {{"w": torch.ones(2)}}, step=1)
gcore_ckpt.verify("steps")
print(gcore_ckpt.load("steps")["w"].tolist())
for use in (
    "gcore_ckpt.Checkpointer('s3://bucket/steps')",
    "import gcore_ckpt.integrations.transformers",
    "import gcore_ckpt.integrations.accelerate",
    "import gcore_ckpt.integrations.lightning",
):
    try:
        exec(use)
    except Exception as error:
        print(error)
"""


def test_steps_in_a_folder_need_no_extra_and_a_missing_one_is_named() -> None:
    command = [sys.executable, "-c", WITHOUT_EXTRAS]
    weights, *errors = subprocess.check_output(command, text=True).splitlines()
    assert weights == "[1.0, 1.0]"
    extras = ("object-store", *HIDDEN[1:])
    for module, extra, error in zip(HIDDEN, extras, errors, strict=True):
        assert error.endswith(f"{module!r} is not installed: pip install 'gcore-ckpt[{extra}]'")


def test_importing_the_package_imports_no_integration() -> None:
    program = "import sys, gcore_ckpt; gcore_ckpt.Checkpointer; print(sorted(sys.modules))"
    loaded = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert "gcore_ckpt.checkpointer" in loaded
    assert not [
        name for name in (*HIDDEN, "torch", "gcore_ckpt.integrations") if f"'{name}'" in loaded
    ]
