"""The `gcore-placement` command line."""

from gcore_placement.cli.command import COMMANDS, main

__all__ = ["COMMANDS", "main"]
