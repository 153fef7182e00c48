"""The error that a command line shows without a traceback, and other errors in one line."""


class UserError(Exception):
    """Wrong input; the message names the field, the value and what would be accepted."""


def one_line(error: BaseException) -> str:
    """Return an error's message without line breaks, as some libraries put into theirs."""
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


def said(error: OSError) -> str:
    """Return the operating system's reason, and the file's name if there is one."""
    reason = error.strerror or one_line(error)
    file = error.filename2 or error.filename
    return f"{file}: {reason}" if file is not None else reason
