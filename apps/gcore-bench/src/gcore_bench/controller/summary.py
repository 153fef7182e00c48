"""From runs to figures, and from figures to whether the aims are met."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gcore_bench.controller.dispatch import ALONE, MEMCPY
from gcore_bench.trainer.figures import Run
from gcore_bench.trainer.summary import summarise

_FLAT, _LESS_OVERHEAD, _OF_MEMCPY = 1.1, 5.0, 0.5
_AIM_MB = 1024


@dataclass(frozen=True, kw_only=True)
class DispatchRow:
    """A contender at a payload: medians of all rounds, the memory the highest."""

    payload_mb: int
    contender: str
    step_s: float
    overhead_s: float | None
    """Beyond the same work alone in the same round."""
    over_memcpy: float | None
    """Payload a second of overhead, over that of a copy in the same round."""
    peak_bytes: float | None
    grown_bytes: float | None
    """Peak less what the process had before its first step."""


def dispatch_rows(runs: Sequence[Run]) -> list[DispatchRow]:
    """A row for each payload and contender."""
    found: list[DispatchRow] = []
    for part in dict.fromkeys(run.part for run in runs):
        of_part = [run for run in runs if run.part == part]
        seconds = {(run.round, run.contender): run.rows[run.contender]["step_s"] for run in of_part}
        rounds = sorted({run.round for run in of_part})
        for name, row in summarise(part, of_part).rows.items():
            has_overhead = name not in (MEMCPY, ALONE)
            overheads = [seconds[number, name] - seconds[number, ALONE] for number in rounds]
            shares = [seconds[number, MEMCPY] / max(o, 1e-6) for number, o in zip(rounds, overheads, strict=True)]
            found.append(
                DispatchRow(
                    payload_mb=int(part.split()[1]),
                    contender=name,
                    step_s=row["step_s"],
                    overhead_s=median(overheads) if has_overhead else None,
                    over_memcpy=median(shares) if has_overhead else None,
                    peak_bytes=row.get("peak_bytes"),
                    grown_bytes=row["peak_bytes"] - row["idle_bytes"] if "peak_bytes" in row else None,
                )
            )
    return found


def aims(rows: Sequence[DispatchRow]) -> list[str]:
    """A line for each aim that the figures can tell of, judged by gcore's worst number of controllers."""
    ours = [row for row in rows if row.contender.startswith("gcore")]
    if not ours:
        return []
    smallest, largest = (choose(row.payload_mb for row in ours) for choose in (min, max))
    lines: list[str] = []
    if smallest < largest:
        peak = {(row.payload_mb, row.contender): row.peak_bytes or 0.0 for row in ours}
        names = [row.contender for row in ours if row.payload_mb == largest and (smallest, row.contender) in peak]
        worst = max(peak[largest, name] / peak[smallest, name] for name in names)
        lines.append(
            f"the busiest controller's memory does not grow with the payload: at {largest:,} MB up to {worst:.2f} "
            f"times that at {smallest:,} MB ({_verdict(worst <= _FLAT)}: at most {_FLAT})"
        )
    lines += _less_overhead(ours, [row for row in rows if row.contender.startswith("verl")])
    shares = [row.over_memcpy for row in ours if row.payload_mb == largest and row.over_memcpy is not None]
    lines.append(
        f"payload a second of overhead, at {largest:,} MB: {min(shares):.2f} to {max(shares):.2f} of a copy in memory "
        f"({_verdict(min(shares) >= _OF_MEMCPY)}: at least {_OF_MEMCPY})"
    )
    return lines


def _less_overhead(ours: Sequence[DispatchRow], verls: Sequence[DispatchRow]) -> list[str]:
    payloads = {row.payload_mb for row in verls} & {row.payload_mb for row in ours}
    if not payloads:
        return []
    payload = _AIM_MB if _AIM_MB in payloads else max(payloads)
    driver_s = min(row.overhead_s or 0.0 for row in verls if row.payload_mb == payload)
    own = [row.overhead_s or 0.0 for row in ours if row.payload_mb == payload]
    ratios = [driver_s / max(overhead_s, 1e-6) for overhead_s in own]
    return [
        f"overhead of verl's driver, the faster of its forms, over gcore's at {payload:,} MB: {min(ratios):.1f} to "
        f"{max(ratios):.1f} ({_verdict(min(ratios) >= _LESS_OVERHEAD)}: at least {_LESS_OVERHEAD:g})"
    ]


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "not met"
