"""How settings are checked at the door."""

from gcore_trainer.errors import ConfigError


def require(field: str, value: object, holds: bool, accepted: str) -> None:
    """
    Raises:
        ConfigError: the value is not what is accepted.
    """
    if not holds:
        raise ConfigError(f"{field} is {value!r}: {accepted} is needed")


def require_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    """
    Raises:
        ConfigError: the value is none of the choices.
    """
    require(field, value, value in choices, f"one of {', '.join(choices)}")
