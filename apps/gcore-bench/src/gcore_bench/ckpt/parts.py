"""The three parts of the bench: their contenders and figures."""

from collections.abc import Mapping
from dataclasses import dataclass, field

LIMITS = "limits"
"""The contender that measures memory and disk alone, in a process of its own too."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One table."""

    title: str
    columns: Mapping[str, str]
    """Titles by metric."""
    contenders: tuple[str, ...] = ()
    """Contenders that can take part; empty: all."""
    ratio_to: Mapping[str, str] = field(default_factory=dict[str, str])
    """Metric of the same row that a metric's ratio is taken to; for others it is the best limit with that metric."""

    @property
    def has_limits(self) -> bool:
        """True if limits are measured in the part."""
        return not self.ratio_to


_SAVE = {"stall": "stall s", "durable": "durable s"}

PARTS = {
    "single": Part(
        title="one process",
        columns=_SAVE
        | {
            "load_cold": "load cold s",
            "load_warm": "load warm s",
            "in_place_cold": "in place cold s",
            "in_place_warm": "in place warm s",
        },
    ),
    "ranks": Part(
        title="several ranks",
        contenders=("gcore", "dcp", "dcp-async-thread"),
        columns=_SAVE
        | {
            "rows_cold": "rows cold s",
            "rows_warm": "rows warm s",
            "columns_cold": "columns cold s",
            "columns_warm": "columns warm s",
        },
    ),
    "loop": Part(
        title="training steps",
        contenders=("gcore", "dcp-async-thread", "dcp-async-process"),
        columns={
            "stall": "stall s",
            "save": "save s",
            "matmul_quiet": "matmul step s",
            "matmul_saving": "matmul, saving s",
            "python_quiet": "Python step s",
            "python_saving": "Python, saving s",
        },
        ratio_to={"matmul_saving": "matmul_quiet", "python_saving": "python_quiet"},
    ),
}
