"""Importlib mode puts no test folder on the path, and `golden_runs` is shared with the script that records."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
