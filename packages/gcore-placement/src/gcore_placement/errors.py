"""The errors of this package."""


class PlacementError(ValueError):
    """Wrong input; the message has the form `FIELD is VALUE; expected ACCEPTED`."""


class MissingExtraError(PlacementError, ImportError):
    """An optional dependency is not installed; the message holds the install command."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(f"{module!r} is not installed: pip install 'gcore-placement[{extra}]'")


def refusal(field: str, value: object, accepted: str) -> PlacementError:
    """Return the error for a field whose value is not accepted: `FIELD is VALUE; expected ACCEPTED`."""
    return PlacementError(f"{field} is {value!r}; expected {accepted}")
