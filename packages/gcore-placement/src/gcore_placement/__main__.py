"""``python -m gcore_placement`` is the command `gcore-placement`."""

import sys

from gcore_placement.cli import main

if __name__ == "__main__":
    sys.exit(main())
