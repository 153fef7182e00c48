"""Errors that a command line shows without a traceback, and checks of settings that raise them."""

import math


class UserError(Exception):
    """Wrong input; the message names the field, the value and what would be accepted."""


def check_run_name(name: str) -> None:
    """
    Raises:
        UserError: the name is not that of a visible folder.
    """
    if not name or "/" in name or name.startswith("."):
        raise UserError(f"name is {name!r}; expected a plain folder name")


def check_at_least(field: str, value: float, lowest: int) -> None:
    """
    Raises:
        UserError: the value of a setting is below ``lowest``.
    """
    if value < lowest:
        raise UserError(f"{field} is {value}; expected {lowest} or more")


def check_lowest(section: str, settings: object, **lowest: int) -> None:
    """Check that each named setting of a section is at least so much.

    Raises:
        UserError: one is below.
    """
    for name, bound in lowest.items():
        check_at_least(f"{section}.{name}", getattr(settings, name), bound)


def check_fraction(field: str, value: float, *, above_zero: bool = False, below_one: bool = False) -> None:
    """
    Raises:
        UserError: the value of a setting is not a number from 0 to 1.
    """
    is_low = value <= 0 if above_zero else value < 0
    if is_low or not (value < 1 if below_one else value <= 1):
        interval = f"{'(' if above_zero else '['}0, 1{')' if below_one else ']'}"
        raise UserError(f"{field} is {value}; expected a number in {interval}")


def check_finite(field: str, value: float, *, above_zero: bool = False) -> None:
    """
    Raises:
        UserError: the value of a setting is not finite, or too low.
    """
    if not (0 < value < math.inf if above_zero else 0 <= value < math.inf):
        raise UserError(f"{field} is {value}; expected a finite number{' above 0' if above_zero else ', 0 or more'}")


def check_port(field: str, port: int) -> None:
    """
    Raises:
        UserError: the value is neither a port nor 0.
    """
    if not 0 <= port <= 65_535:
        raise UserError(f"{field} is {port}; expected a port from 1 to 65535, or 0 for none")


def one_line(error: BaseException) -> str:
    """Return an error's message without line breaks, as some libraries put into theirs."""
    return " ".join(line.strip() for line in str(error).splitlines() if line.strip())


def said(error: OSError) -> str:
    """Return the operating system's reason, and the file's name if there is one."""
    reason = error.strerror or one_line(error)
    file = error.filename2 or error.filename
    return f"{file}: {reason}" if file is not None else reason
