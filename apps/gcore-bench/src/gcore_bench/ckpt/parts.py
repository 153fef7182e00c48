"""The three parts of the bench: who takes part, and what is measured."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Column:
    """One figure of a part."""

    metric: str
    title: str
    ratio_to: str = ""
    """Another metric of the same row that the ratio is taken to; empty: the best limit that has this metric."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One table."""

    title: str
    contenders: tuple[str, ...]
    """Who can take part; empty: everyone."""
    has_limits: bool
    columns: tuple[Column, ...]


LIMITS = "limits"
"""What runs beside the contenders, in a process of its own too."""

PARTS = {
    "single": Part(
        title="one process",
        contenders=(),
        has_limits=True,
        columns=(
            Column(metric="stall", title="stall s"),
            Column(metric="durable", title="durable s"),
            Column(metric="load_cold", title="load cold s"),
            Column(metric="load_warm", title="load warm s"),
            Column(metric="in_place_cold", title="in place cold s"),
            Column(metric="in_place_warm", title="in place warm s"),
        ),
    ),
    "ranks": Part(
        title="several ranks",
        contenders=("gcore", "dcp", "dcp-async-thread"),
        has_limits=True,
        columns=(
            Column(metric="stall", title="stall s"),
            Column(metric="durable", title="durable s"),
            Column(metric="rows_cold", title="rows cold s"),
            Column(metric="rows_warm", title="rows warm s"),
            Column(metric="columns_cold", title="columns cold s"),
            Column(metric="columns_warm", title="columns warm s"),
        ),
    ),
    "loop": Part(
        title="training steps",
        contenders=("gcore", "dcp-async-thread", "dcp-async-process"),
        has_limits=False,
        columns=(
            Column(metric="stall", title="stall s"),
            Column(metric="save", title="save s"),
            Column(metric="matmul_quiet", title="matmul step s"),
            Column(metric="matmul_saving", title="matmul, saving s", ratio_to="matmul_quiet"),
            Column(metric="python_quiet", title="Python step s"),
            Column(metric="python_saving", title="Python, saving s", ratio_to="python_quiet"),
        ),
    ),
}
