"""``python -m gcore_ckpt`` is the command `gcore-ckpt`."""

import sys

from gcore_ckpt.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
