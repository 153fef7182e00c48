"""Tests share files of this folder."""

import sys
from pathlib import Path

# Importlib mode puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))
