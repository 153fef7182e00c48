"""The errors of this package, and checks of its input."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


class PlacementError(ValueError):
    """Wrong input; the message has the form `FIELD is VALUE; expected ACCEPTED`."""


class MissingExtraError(PlacementError, ImportError):
    """An optional dependency is not installed; the message holds the install command."""

    def __init__(self, module: str, extra: str) -> None:
        super().__init__(f"{module!r} is not installed: pip install 'gcore-placement[{extra}]'")


def refusal(field: str, value: object, accepted: str) -> PlacementError:
    """Return the error for a field whose value is not accepted: `FIELD is VALUE; expected ACCEPTED`."""
    return PlacementError(f"{field} is {value!r}; expected {accepted}")


def check_positive(field: str, value: object) -> None:
    """Raise PlacementError unless `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise refusal(field, value, "an integer of at least 1")


def check_above_0(field: str, value: object) -> None:
    """Raise PlacementError unless `value` is a finite number above 0."""
    number = float("nan") if isinstance(value, bool) or not isinstance(value, float | int | np.number) else float(value)
    if not 0 < number < np.inf:
        raise refusal(field, value, "a finite number above 0")


def check_share(field: str, value: float) -> None:
    """Raise PlacementError unless `value` is a number above 0 and at most 1."""
    check_above_0(field, value)
    if value > 1:
        raise refusal(field, value, "a number above 0, at most 1")


def check_amounts(field: str, values: ArrayLike) -> NDArray[np.float64]:
    """Return `values` as float64 of the same shape.

    Raises:
        PlacementError: a value is not a number, not finite, or negative; the first such index is named.
    """
    try:
        amounts = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise PlacementError(f"{field} is {values!r}; expected an array of numbers ({error})") from error
    wrong = ~np.isfinite(amounts) | (amounts < 0)
    if wrong.any():
        index = np.unravel_index(int(wrong.argmax()), amounts.shape)
        where = ", ".join(str(int(axis)) for axis in index)
        raise refusal(f"{field}[{where}]" if where else field, float(amounts[index]), "a finite number of at least 0")
    return amounts


def check_amount_list(field: str, values: ArrayLike) -> NDArray[np.float64]:
    """Return `values` as float64 [num_items]. Raises PlacementError as `check_amounts`, and on any other rank."""
    amounts = check_amounts(field, values)
    if amounts.ndim != 1:
        raise refusal(f"{field}.ndim", amounts.ndim, "1 (one number per item)")
    return amounts


def check_lengths(field: str, values: ArrayLike) -> NDArray[np.float64]:
    """Return token counts as float64. Raises PlacementError as `check_amounts`, and on a fraction of a token."""
    lengths = check_amounts(field, values)
    fractions = lengths != np.floor(lengths)
    if fractions.any():
        raise refusal(field, float(lengths[fractions].flat[0]), "whole numbers of tokens")
    return lengths


def required(mapping: Mapping[str, object], key: str) -> object:
    """Return `mapping[key]`. Raises PlacementError where the key is missing or None."""
    value = mapping.get(key)
    if value is None:
        raise PlacementError(
            f"config has no {key!r}: expected the config.json of a Llama, Mistral, Mixtral, Qwen2, Qwen3 or Qwen3-MoE "
            f"model, got the keys {sorted(mapping)}"
        )
    return value


Positive = Annotated[int, check_positive]
"""An integer of at least 1."""
Above0 = Annotated[float, check_above_0]
"""A finite number above 0."""
Share = Annotated[float, check_share]
"""A number above 0, at most 1."""
Amount = Annotated[float, check_amounts]
"""A finite number of at least 0."""


class Checked:
    """A dataclass whose fields are checked by what their types say: `Positive`, `Above0`, `Share` or `Amount`.

    Raises:
        PlacementError: a field is out of its bounds.
    """

    def __post_init__(self) -> None:
        for name, check in _checks(type(self)):
            check(name, getattr(self, name))


@cache
def _checks(kind: Any) -> list[tuple[str, Callable[[str, Any], object]]]:
    return [(field.name, check) for field in fields(kind) for check in getattr(field.type, "__metadata__", ())]
