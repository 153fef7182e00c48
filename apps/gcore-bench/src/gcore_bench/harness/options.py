"""Options that all benches have, with their bounds."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeAlias

from gcore_runs import EXISTING_FOLDER, Bound, Checked, above as above, multiple_of as multiple_of, within


class BenchError(Exception):
    """Wrong options, or a contender that failed: the command line shows it without a traceback."""


def at_least(least: float) -> Bound:
    """Accept numbers from ``least`` on."""
    return Bound(lambda value: value >= least, f"at least {least:g}")


Count: TypeAlias = Annotated[int, at_least(1)]
NonNegative: TypeAlias = Annotated[int, at_least(0)]
Sigma: TypeAlias = Annotated[float, within(0, 10)]
OutputFile: TypeAlias = Annotated[Path | None, EXISTING_FOLDER]


@dataclass(frozen=True, kw_only=True)
class BenchOptions(Checked):
    """Base of every bench's options; it checks the bounds of all fields.

    A tuple may be empty only where that is its default.

    Raises:
        BenchError: an option is out of its bounds.
    """

    error = BenchError

    rounds: Count = 3
    """Number of rounds, in each of which everything is measured once, in turn."""
    json: OutputFile = None
    """File to write every figure to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in fields(self):
            if getattr(self, field.name) == () and field.default:
                raise BenchError(f"{field.name} is empty; expected at least one entry")


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
