"""The part balancer: long-tailed sequences over ranks, under gcore-placement, verl and random."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from gcore_bench.harness.report import figures_table, verdict
from gcore_bench.placement.options import Counts, PlacementOptions
from gcore_placement import balance

PRECISION = 1e-9
"""Within which two ratios are alike: of a step of an hour, four microseconds."""
JUDGED_SAMPLES, AIM_FASTER = 100_000, 20
"""Sequences from which the speed is judged, and what it should be over verl's."""

_VERL_MODULE = "verl.utils.seqlen_balancing"
_LONGEST = 32_768
_VERL_GROWTH = 1.1
"""Exponent of verl's time in the number of sequences."""


@dataclass(frozen=True, kw_only=True)
class BalancerRow:
    """One batch over one number of ranks: work of the busiest rank over the mean, and CPU seconds.

    `verl_` figures are None where it was not asked; `tolerance` is within which of the mean ours may end.
    """

    lengths: str
    samples: int
    ranks: int
    counts: str
    ours: float
    ours_s: float
    verl: float | None
    verl_s: float | None
    random: float
    tolerance: float = 0.0

    @property
    def is_as_even(self) -> bool | None:
        """Return whether ours is at or below verl's, within `PRECISION`, or within its tolerance of the mean."""
        return None if self.verl is None else self.ours <= max(self.verl, 1 + self.tolerance) * (1 + PRECISION)

    @property
    def times_faster(self) -> float | None:
        """verl's CPU seconds over ours."""
        return None if self.verl_s is None else self.verl_s / self.ours_s


def run_balancer(options: PlacementOptions, *, say: Callable[[str], object]) -> list[BalancerRow]:
    """Every distribution, number of ranks, kind of counts and batch, the batches ascending."""
    rows: list[BalancerRow] = []
    if options.verl_s:
        import_module(_VERL_MODULE)  # which takes seconds, and is not to be timed
    for lengths, ranks, counts in product(options.lengths, options.ranks, options.counts):
        last: BalancerRow | None = None
        for samples in sorted(set(options.samples)):
            last = _row(lengths, samples, ranks, counts, options, last)
            rows.append(last)
            theirs = "not asked" if last.verl is None else f"{last.verl:.9f} in {last.verl_s:.2f} s"
            say(
                f"{lengths}, {samples:,} over {ranks}, {counts} counts: {last.ours:.9f} in {last.ours_s:.3f} s; "
                f"verl {theirs}; random {last.random:.3f}"
            )
    return rows


def simulated_work(lengths: str, samples: int, *, seed: int) -> NDArray[np.int64]:
    """Return the work of long-tailed sequences by verl's measure, `calculate_workload`: 24576 L + L^2."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(6.5, 1.0, samples) if lengths == "lognormal" else 200 * (1 + rng.pareto(1.2, samples))
    tokens = drawn.clip(16, _LONGEST).astype(np.int64)
    return 24_576 * tokens + tokens**2


def _row(
    lengths: str, samples: int, ranks: int, counts: str, options: PlacementOptions, last: BalancerRow | None
) -> BalancerRow:
    work = simulated_work(lengths, samples, seed=options.seed)
    equal, tolerance = counts != "free", options.tolerance if counts == "close" else 0.0

    def measured(partition: Callable[[], Sequence[Any]]) -> tuple[float, float]:
        begin_s = time.process_time()
        parts = partition()
        took_s = time.process_time() - begin_s
        return _ratio(work, parts), took_s

    ours, ours_s = measured(partial(balance, work, ranks, equal_count=equal, tolerance=tolerance))
    expected_s, verl, verl_s = 0.0, None, None
    if last is not None:
        expected_s = np.inf if last.verl_s is None else last.verl_s * (samples / last.samples) ** _VERL_GROWTH
    if options.verl_s > 0 and expected_s <= options.verl_s:
        # It takes Python's integers, which it is quickest at.
        theirs = import_module(_VERL_MODULE).get_seqlen_balanced_partitions
        verl, verl_s = measured(lambda: theirs(work.tolist(), k_partitions=ranks, equal_size=equal))
    return BalancerRow(
        lengths=lengths,
        samples=samples,
        ranks=ranks,
        counts=counts,
        ours=ours,
        ours_s=ours_s,
        verl=verl,
        verl_s=verl_s,
        random=_ratio(work, list(np.random.default_rng(options.seed).permutation(samples).reshape(ranks, -1))),
        tolerance=tolerance,
    )


def _ratio(work: NDArray[np.int64], parts: Sequence[Any]) -> float:
    sums = np.array([int(work[np.asarray(part, dtype=np.intp)].sum()) for part in parts])
    return float(sums.max() / sums.mean())


def balancer_table(rows: Sequence[BalancerRow]) -> Table:
    """A line for each batch and number of ranks."""
    columns = ("samples", "ranks", "counts", "ours - 1", "verl - 1", "random - 1", "ours s", "verl s", "faster")
    shown = figures_table("work of the busiest rank over the mean, less 1; CPU seconds", *columns)
    for row in rows:
        verl, verl_s, faster = "-", "-", "-"
        if row.verl is not None:
            verl, verl_s, faster = f"{row.verl - 1:.1e}", f"{row.verl_s:.2f}", f"{row.times_faster:.1f}x"
        ratios = (f"{row.ours - 1:.1e}", verl, f"{row.random - 1:.1e}")
        batch = (row.lengths, f"{row.samples:,}", str(row.ranks), row.counts)
        shown.add_row(*batch, *ratios, f"{row.ours_s:.3f}", verl_s, faster)
    return shown


def balancer_aims(rows: Sequence[BalancerRow]) -> list[str]:
    """Return whether gcore's aims are met, where verl was measured."""
    asked = [row for row in rows if row.is_as_even is not None]
    if not asked:
        return []
    worse = [f"{row.samples:,} over {row.ranks} ({row.lengths}, {row.counts})" for row in asked if not row.is_as_even]
    even = f"not met: {'; '.join(worse)}" if worse else f"met in all {len(asked)}"
    lines = [f"aim: as even as verl's or more, to {PRECISION:.0e} of the ratio ({even})"]
    for counts in get_args(Counts):
        judged = [row.times_faster for row in asked if row.samples >= JUDGED_SAMPLES and row.counts == counts]
        if found := [speed for speed in judged if speed is not None]:
            lines.append(
                f"aim: {AIM_FASTER} times as fast as verl from {JUDGED_SAMPLES:,} sequences on, {counts} counts: "
                f"{min(found):.1f} to {max(found):.1f} times ({verdict(min(found) >= AIM_FASTER)})"
            )
    return lines
