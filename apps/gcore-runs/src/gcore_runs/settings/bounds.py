"""Bounds of settings in their types, which are checked when the settings are made."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from inspect import get_annotations
from operator import attrgetter
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
Amount: TypeAlias = Annotated[
    float, Bound(lambda value: 0 <= value < math.inf, "a finite number, 0 or more")
]
Positive: TypeAlias = Annotated[
    float, Bound(lambda value: 0 < value < math.inf, "a finite number above 0")
]
Fraction: TypeAlias = Annotated[float, Bound(lambda value: 0 <= value <= 1, "a number in [0, 1]")]
FractionAbove0: TypeAlias = Annotated[
    float, Bound(lambda value: 0 < value <= 1, "a number in (0, 1]")
]
FractionBelow1: TypeAlias = Annotated[float, within(0, 1)]

EXISTING_FOLDER = Bound(
    lambda path: path in (None, "") or Path(path).absolute().parent.is_dir(),
    "a file in an existing folder",
)
"""Accept files that can be written, and none."""


class Checked:
    """Base of a dataclass whose fields are checked by the bounds in their types: ``n: Annotated[int, at_least(2)]``.

    The bounds of ``tuple[Annotated[int, at_least(1)], ...]`` are checked entry by entry. A field that a subclass
    declares again keeps its bounds, unless it has others there. What depends on several fields is a `require`.
    """

    section: ClassVar[str] = ""
    """Dotted place of the fields, named in errors: ``class DataConfig(Checked, section="data")``."""
    error: ClassVar[type[Exception]] = UserError
    """Type of the errors."""

    def __init_subclass__(cls, *, section: str | None = None) -> None:
        if section is not None:
            cls.section = section

    def __post_init__(self) -> None:
        check_bounds(self, self.section, self.error)

    def require(self, name: str, holds: object, expected: str) -> None:
        """Raise the error of a field, by its name or by a dotted one in a section, unless a condition holds."""
        if not holds:
            section = f"{self.section}.".lstrip(".")
            raise self.error(
                f"{section}{name} is {format_value(attrgetter(name)(self))}; expected {expected}"
            )


def format_value(value: object) -> str:
    """Return a setting's value as errors show it: true and false as in TOML, anything else as in Python."""
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def check_bounds(settings: Any, section: str = "", error: type[Exception] = UserError) -> None:
    """Raise ``error`` if a field is out of the bounds in its type, also in a section that is not `Checked` itself."""
    prefix = f"{section}.".lstrip(".")
    for name, bound, is_of_entries in _bounds(type(settings)):
        values = getattr(settings, name)
        verb = "holds"
        if not is_of_entries:
            values = (values,)
            verb = "is"
        for value in values:
            if bound.holds(value):
                continue
            if isinstance(value, Path):
                value = str(value)
            raise error(f"{prefix}{name} {verb} {value!r}; expected {bound.expected}")
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value) and not isinstance(value, Checked):
            check_bounds(value, prefix + field.name, error)


@cache
def _bounds(settings_type: type) -> list[tuple[str, Bound, bool]]:
    """Return the name of each bounded field, the bound, and whether it is of the entries of a tuple."""
    bounds: list[tuple[str, Bound, bool]] = []
    for field in fields(cast(Any, settings_type)):
        for owner in settings_type.__mro__:
            hint = get_annotations(owner).get(field.name)
            is_of_entries = get_origin(hint) is tuple
            if is_of_entries:
                hint = get_args(hint)[0]
            declared = [
                bound for bound in getattr(hint, "__metadata__", ()) if isinstance(bound, Bound)
            ]
            if declared:
                bounds.extend((field.name, bound, is_of_entries) for bound in declared)
                break
    return bounds
