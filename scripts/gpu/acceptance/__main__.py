"""Run the command, as ``python -m acceptance`` does."""

import sys

from acceptance.command import main

sys.exit(main())
