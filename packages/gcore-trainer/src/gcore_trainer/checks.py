"""Checks of settings and arrays."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.errors import BatchError, ConfigError

_LARGEST = np.finfo(np.float32).max


def require(field: str, value: object, holds: bool, accepted: str) -> None:
    """Check a setting.

    Raises:
        ConfigError: the check does not hold.
    """
    if not holds:
        raise ConfigError(f"{field} is {value!r}; expected {accepted}")


def require_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    """Check that a setting is one of some choices.

    Raises:
        ConfigError: it is not.
    """
    require(field, value, value in choices, f"one of {', '.join(choices)}")


def require_finite(field: str, values: NDArray[Any], mask: NDArray[np.bool_] | None = None) -> None:
    """Refuse NaN, infinities and numbers that float32 cannot hold, at the entries that count.

    Args:
        field: name of the array, for the error.
        values: of any shape.
        mask: of the same shape, True where an entry counts; None: all of them.

    Raises:
        BatchError: an entry that counts is not finite.
    """
    # A comparison with NaN is False.
    is_bad = ~(np.abs(values) <= _LARGEST)
    if mask is not None:
        is_bad &= mask
    if is_bad.any():
        first = np.argwhere(is_bad)[0].tolist()
        place = "".join(f"[{i}]" for i in first)
        raise BatchError(
            f"{field}{place} is {values[tuple(first)]}; expected a finite float32 at every entry that counts "
            f"({int(is_bad.sum())} of {is_bad.size} are not)"
        )
