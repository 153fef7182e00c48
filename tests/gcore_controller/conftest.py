"""Tests of every runtime share files of this folder."""

import os
import sys
from pathlib import Path

# Importlib mode puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

# Ray reads it on import, which a test module may do before `gcore_controller.ray_runtime` does.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
