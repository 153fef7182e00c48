"""Importlib mode puts no test folder on the path, and `house` is shared by all files of this one."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
