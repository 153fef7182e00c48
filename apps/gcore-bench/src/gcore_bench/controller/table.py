"""The figures as a person reads them."""

from collections.abc import Sequence

from rich.table import Table

from gcore_bench.controller.options import ControllerOptions
from gcore_bench.controller.scaling import ScalingRow
from gcore_bench.controller.summary import DispatchRow
from gcore_bench.tables import figures_table


def dispatch_table(rows: Sequence[DispatchRow], options: ControllerOptions, load: float) -> Table:
    """All payloads, one after the other."""
    columns = ("payload MB", "step s", "overhead s", "of memcpy's rate", "busiest process MB", "grown by MB")
    shown = figures_table("a step's payload, from rollout workers to trainer ranks", *columns)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        shown.add_row(
            row.contender,
            f"{row.payload_mb:,}",
            f"{row.step_s:.3f}",
            "-" if row.overhead_s is None else f"{row.overhead_s:.3f}",
            "-" if row.over_memcpy is None else f"{row.over_memcpy:.2f}x",
            _mb(row.peak_bytes),
            _mb(row.grown_bytes),
            end_section=following is not None and following.payload_mb != row.payload_mb,
        )
    shown.caption = f"medians of {options.rounds} rounds; load of the machine {load:.1f}"
    return shown


def _mb(nbytes: float | None) -> str:
    return "-" if nbytes is None else f"{nbytes / 2**20:,.0f}"


def scaling_table(rows: Sequence[ScalingRow]) -> Table:
    """A line for each simulated cluster."""
    columns = ("controllers", "steps", "step s", "busiest controller, of a core", "real s")
    shown = figures_table("simulated clusters, by devices", *columns)
    for row in rows:
        cells = [f"{row.step_s:,.1f}", f"{row.load:.3%}", f"{row.wall_s:.1f}"]
        shown.add_row(f"{row.devices:,}", str(row.controllers), str(row.steps), *cells)
    return shown


def notes(options: ControllerOptions) -> list[str]:
    """What a reader must know to judge the figures."""
    lines: list[str] = []
    if "dispatch" in options.parts:
        lines.append(
            "dispatch: overhead: step less making the same features and reading them where they are. Of memcpy's rate: "
            "payload a second of overhead over that of a copy into shared memory. Busiest process: of the control "
            "processes, its own resident memory (RssAnon), looked at every 5 ms, without the object store's pages."
        )
    if "sim" in options.parts:
        lines.append(
            "sim: gcore-llm simulate's models behind the real program. Load: processor seconds of the busiest "
            "controller's own code for a simulated second; what messages take is not modelled."
        )
    return lines
