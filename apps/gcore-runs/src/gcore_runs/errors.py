"""The error that a command line shows without a traceback, and text from outside as a terminal may show it."""

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that move a terminal's cursor or change its state or direction; not line breaks and tabs."""


class UserError(Exception):
    """Wrong input; the message names the field, the value and what would be accepted."""


def printable(text: str) -> str:
    """Return a text in which control characters, which may come from a response, a reward or a server, are escaped."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def one_line(error: object) -> str:
    """Return an error's message without line breaks, as some libraries put into theirs, and control characters."""
    lines = [line.strip() for line in str(error).splitlines()]
    return printable(" ".join(line for line in lines if line))


def said(error: OSError) -> str:
    """Return the operating system's reason, and the file's name if there is one."""
    reason = error.strerror or one_line(error)
    file = error.filename2 or error.filename
    return f"{file}: {reason}" if file is not None else reason
