"""Bounds that are declared in the types of a dataclass's fields, and the one check of them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from inspect import get_annotations
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias, cast, get_args, get_origin

from gcore_runs.errors import UserError


@dataclass(frozen=True)
class Bound:
    """A condition on a value, and its wording in the error. NaN satisfies none of those below."""

    holds: Callable[[Any], bool]
    expected: str


def at_least(lowest: float, expected: str = "") -> Bound:
    """Accept numbers from ``lowest`` on."""
    return Bound(lambda value: value >= lowest, expected or f"{lowest:g} or more")


def above(limit: float, expected: str = "") -> Bound:
    """Accept numbers greater than ``limit``."""
    return Bound(lambda value: value > limit, expected or f"a number above {limit:g}")


def within(low: float, high: float) -> Bound:
    """Accept numbers of the half-open interval."""
    return Bound(lambda value: low <= value < high, f"a number in [{low:g}, {high:g})")


def multiple_of(factor: int) -> Bound:
    """Accept multiples of ``factor``."""
    return Bound(lambda value: value % factor == 0, f"a multiple of {factor}")


Count: TypeAlias = Annotated[int, at_least(1)]
NonNegative: TypeAlias = Annotated[int, at_least(0)]
Amount: TypeAlias = Annotated[float, Bound(lambda value: 0 <= value < math.inf, "a finite number, 0 or more")]
Positive: TypeAlias = Annotated[float, Bound(lambda value: 0 < value < math.inf, "a finite number above 0")]
Fraction: TypeAlias = Annotated[float, Bound(lambda value: 0 <= value <= 1, "a number in [0, 1]")]
FractionAbove0: TypeAlias = Annotated[float, Bound(lambda value: 0 < value <= 1, "a number in (0, 1]")]
FractionBelow1: TypeAlias = Annotated[float, within(0, 1)]

EXISTING_FOLDER = Bound(
    lambda path: path in (None, "") or Path(path).absolute().parent.is_dir(), "a file in an existing folder"
)
"""Accept files that can be written, and none."""


class Checked:
    """Base of a dataclass whose fields are checked by the bounds in their types: ``n: Annotated[int, at_least(2)]``.

    The bounds of ``tuple[Annotated[int, at_least(1)], ...]`` are checked entry by entry. A field that a subclass
    declares again keeps its bounds, unless it has others there.

    Raises:
        UserError: a field is out of its bounds.
    """

    section: ClassVar[str] = ""
    """Dotted place of the fields, named in errors."""
    error: ClassVar[type[Exception]] = UserError
    """Type of the errors."""

    def __post_init__(self) -> None:
        check_bounds(self, self.section, self.error)


def check_bounds(settings: Any, section: str = "", error: type[Exception] = UserError) -> None:
    """Raise ``error`` if a field of a dataclass is out of the bounds in its type; ``section`` is the fields' place."""
    for name, bound, is_of_entries in _bounds(type(settings)):
        value = getattr(settings, name)
        for checked in value if is_of_entries else (value,):
            if not bound.holds(checked):
                shown = repr(str(checked)) if isinstance(checked, str | Path) else checked
                verb = "holds" if is_of_entries else "is"
                raise error(f"{section}{'.' if section else ''}{name} {verb} {shown}; expected {bound.expected}")


@cache
def _bounds(kind: type) -> list[tuple[str, Bound, bool]]:
    """Return the name of each bounded field, the bound, and whether it is of the entries of a tuple."""
    found: list[tuple[str, Bound, bool]] = []
    for name in (field.name for field in fields(cast(Any, kind))):
        for owner in kind.__mro__:
            hint = get_annotations(owner).get(name)
            is_of_entries = get_origin(hint) is tuple
            metadata = getattr(get_args(hint)[0] if is_of_entries else hint, "__metadata__", ())
            if own := [(name, bound, is_of_entries) for bound in metadata if isinstance(bound, Bound)]:
                found += own
                break
    return found


def check_at_least(field: str, value: float, lowest: int) -> None:
    """Raise `UserError` if the value of a setting is below ``lowest``."""
    if value < lowest:
        raise UserError(f"{field} is {value}; expected {lowest} or more")


def check_lowest(section: str, settings: object, **lowest: int) -> None:
    """Raise `UserError` if one of a section's settings is below the given number."""
    for name, number in lowest.items():
        check_at_least(f"{section}.{name}".lstrip("."), getattr(settings, name), number)


def check_fraction(field: str, value: float, *, above_zero: bool = False, below_one: bool = False) -> None:
    """Raise `UserError` if the value of a setting is not a number from 0 to 1."""
    is_low = value <= 0 if above_zero else value < 0
    if is_low or not (value < 1 if below_one else value <= 1):
        interval = f"{'(' if above_zero else '['}0, 1{')' if below_one else ']'}"
        raise UserError(f"{field} is {value}; expected a number in {interval}")


def check_finite(field: str, value: float, *, above_zero: bool = False) -> None:
    """Raise `UserError` if the value of a setting is not finite, or too low."""
    if not (0 < value < math.inf if above_zero else 0 <= value < math.inf):
        raise UserError(f"{field} is {value}; expected a finite number{' above 0' if above_zero else ', 0 or more'}")
