"""The error that a command line shows without a traceback."""


class UserError(Exception):
    """Wrong input; the message names the field, the value and what would be accepted."""
