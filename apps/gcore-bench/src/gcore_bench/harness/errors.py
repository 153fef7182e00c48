"""Errors that the command line shows without a traceback."""


class BenchError(Exception):
    """Wrong options, or a contender that failed."""
