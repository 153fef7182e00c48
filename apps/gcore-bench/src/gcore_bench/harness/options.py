"""Options that all benches have, and bounds that are declared next to each field."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeAlias, get_args, get_type_hints


class BenchError(Exception):
    """Wrong options, or a contender that failed: the command line shows it without a traceback."""


@dataclass(frozen=True)
class Bound:
    """A condition on an option, and its wording in the error. NaN satisfies none of those below."""

    holds: Callable[[Any], bool]
    expected: str


def at_least(least: float) -> Bound:
    """Accept numbers from ``least`` on."""
    return Bound(lambda value: value >= least, f"at least {least:g}")


def above(limit: float) -> Bound:
    """Accept numbers greater than ``limit``."""
    return Bound(lambda value: value > limit, f"a number above {limit:g}")


def within(low: float, high: float) -> Bound:
    """Accept numbers of the half-open interval."""
    return Bound(lambda value: low <= value < high, f"a number in [{low:g}, {high:g})")


def multiple_of(factor: int) -> Bound:
    """Accept multiples of ``factor``."""
    return Bound(lambda value: value % factor == 0, f"a multiple of {factor}")


Count: TypeAlias = Annotated[int, at_least(1)]
NonNegative: TypeAlias = Annotated[int, at_least(0)]
Sigma: TypeAlias = Annotated[float, within(0, 10)]
OutputFile: TypeAlias = Annotated[
    Path | None, Bound(lambda path: path is None or path.absolute().parent.is_dir(), "a file in an existing folder")
]


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Base of every bench's options; it checks the bounds of all fields.

    A tuple is checked entry by entry, and may be empty only where that is its default.

    Raises:
        BenchError: an option is out of its bounds.
    """

    rounds: Count = 3
    """Number of rounds, in each of which everything is measured once, in turn."""
    json: OutputFile = None
    """File to write every figure to."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for field in fields(self):
            hint, value = hints[field.name], getattr(self, field.name)
            if not isinstance(value, tuple):
                self._check(field.name, "is", value, hint)
                continue
            if not value and field.default:
                raise BenchError(f"{field.name} is empty; expected at least one entry")
            for entry in value:
                self._check(field.name, "holds", entry, get_args(hint)[0])

    def _check(self, name: str, verb: str, value: Any, hint: Any) -> None:
        for bound in getattr(hint, "__metadata__", ()):
            if isinstance(bound, Bound) and not bound.holds(value):
                raise BenchError(f"{name} {verb} {value}; expected {bound.expected}")


@dataclass(frozen=True, kw_only=True)
class QuickOptions(BenchOptions):
    """Options of a bench that can run at sizes which take no time."""

    quick: bool = False
    """Measure everything once at tiny sizes, to see that it runs. The figures mean nothing."""

    QUICK: ClassVar[Mapping[str, Any]] = {}
    """Values of the options that ``quick`` replaces."""

    def sized(self) -> Self:
        """Return the options with the sizes of ``quick`` if that was asked for."""
        return replace(self, **self.QUICK) if self.quick else self
