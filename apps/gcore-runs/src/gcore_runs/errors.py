"""What a command line shows without a traceback."""


class UserError(Exception):
    """Wrong input; the message names the field, the value and what would be accepted."""


def check_run_name(name: str) -> None:
    """
    Raises:
        UserError: no folder can have the name, or none that is seen.
    """
    if not name or "/" in name or name.startswith("."):
        raise UserError(f"name is {name!r}: a plain folder name is needed")


def check_at_least(field: str, value: float, lowest: int) -> None:
    """
    Raises:
        UserError: the value of a setting is below what it may be.
    """
    if value < lowest:
        raise UserError(f"{field} is {value}: {lowest} or more is needed")


def check_port(field: str, port: int) -> None:
    """
    Raises:
        UserError: no such port; 0 is none.
    """
    if not 0 <= port <= 65_535:
        raise UserError(f"{field} is {port}; expected a port from 1 to 65535, or 0 for none")


def one_line(error: BaseException) -> str:
    """Return an error's message without line breaks, as some libraries put into theirs."""
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


def said(error: OSError) -> str:
    """Return what the operating system says, and of which file."""
    reason = error.strerror or one_line(error)
    file = error.filename2 or error.filename
    return f"{file}: {reason}" if file is not None else reason
