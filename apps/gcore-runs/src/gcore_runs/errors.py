"""What a command line shows without a traceback."""


class UserError(Exception):
    """Wrong input; the message names the field, the value and what would be accepted."""


def check_at_least(field: str, value: float, lowest: int) -> None:
    """
    Raises:
        UserError: the value of a setting is below what it may be.
    """
    if value < lowest:
        raise UserError(f"{field} is {value}: {lowest} or more is needed")
