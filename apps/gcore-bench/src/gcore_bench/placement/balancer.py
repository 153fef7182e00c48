"""The part balancer: long-tailed sequences divided over ranks by gcore-placement, by verl and at random."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gcore_bench.harness.processes import timed
from gcore_bench.harness.report import BenchSession, Row, verdict, verdict_on_all
from gcore_bench.placement.options import PlacementOptions
from gcore_bench.placement.tables import FigureTable
from gcore_placement import balance

Work: TypeAlias = NDArray[np.int64]
"""Work of each sequence."""

SIZES = ((512, 4096, 16_384, 100_352, 1_000_448), (8, 64, 512))
"""Sequences of the batches, and numbers of ranks."""
QUICK_SIZES = ((64, 512), (4, 8))
BOUNDS: dict[str, dict[str, Any]] = {
    "free": {"equal_count": False},
    "equal": {"equal_count": True},
    "close": {"equal_count": True, "tolerance": 1e-3},
}
"""Arguments of `balance`. free: only the work is balanced; equal: each rank gets the same number of sequences; close:
as equal, and the search ends when the busiest rank is within the tolerance of the mean."""
VERL_LIMIT_S = 240.0
"""verl is left out if its time for the next smaller batch predicts more CPU seconds than this."""

_VERL_MODULE = "verl.utils.seqlen_balancing"

PROGRESS = "{lengths}, {samples:,} over {ranks}, {counts} counts: {ours_s:.3f} s"
COLUMNS = {
    "": "{lengths}",
    "samples": "{samples:,}",
    "ranks": "{ranks}",
    "counts": "{counts}",
    "ours": "{ours:.1e}",
    "verl": "{verl:.1e}",
    "random": "{random:.1e}",
    "ours s": "{ours_s:.3f}",
    "verl s": "{verl_s:.2f}",
    "faster": "{speedup:.1f}x",
}


def run(options: PlacementOptions, session: BenchSession) -> list[FigureTable]:
    """Divide each batch over each number of ranks, for each distribution of lengths and each kind of bound.

    Rows have the imbalance (work of the busiest rank over the mean, less 1) of ``ours``, ``verl`` and ``random``, and
    the CPU seconds ``ours_s`` and ``verl_s``.
    """
    samples, ranks = QUICK_SIZES if options.quick else SIZES
    # The import takes seconds, which are not to be timed.
    import_module(_VERL_MODULE)
    rows: list[Row] = []
    for case in product(("lognormal", "pareto"), ranks, BOUNDS):
        rows += divide_batches(
            *case,
            samples=samples,
            seed=options.seed,
            say=session.say,
        )
    title = "work of the busiest rank over the mean, less 1; CPU seconds"
    return [
        FigureTable(
            title=title,
            columns=COLUMNS,
            rows=rows,
            aims=check_aims(rows),
        )
    ]


def divide_batches(
    lengths: str,
    num_ranks: int,
    counts: str,
    *,
    samples: Sequence[int],
    seed: int,
    say: Callable[[str], object],
) -> list[Row]:
    """Divide batches of ascending size over so many ranks, and return a row for each."""
    rows: list[Row] = []
    expected_s = 0.0
    smaller = 1
    for num_samples in samples:
        work = simulate_work(lengths, num_samples, seed=seed)
        row: Row = {
            "lengths": lengths,
            "samples": num_samples,
            "ranks": num_ranks,
            "counts": counts,
        }
        divide = partial(balance, work, num_ranks, **BOUNDS[counts])
        row["ours"], row["ours_s"] = _measure(work, divide)
        shuffled = np.random.default_rng(seed).permutation(work)
        sums = shuffled.reshape(num_ranks, -1).sum(axis=1)
        row["random"] = sums.max() / sums.mean() - 1
        # The exponent of verl's time as a function of the number of sequences.
        expected_s *= (num_samples / smaller) ** 1.1
        if expected_s <= VERL_LIMIT_S:
            row["verl"], row["verl_s"] = _measure_verl(work, num_ranks, equal_size=counts != "free")
            row["speedup"] = row["verl_s"] / row["ours_s"]
        expected_s = row.get("verl_s", np.inf)
        smaller = num_samples
        rows.append(row)
        say(PROGRESS.format_map(row))
    return rows


def simulate_work(lengths: str, num_samples: int, *, seed: int) -> Work:
    """Return the work of long-tailed sequences by verl's measure, `calculate_workload`: 24576 L + L^2."""
    rng = np.random.default_rng(seed)
    if lengths == "lognormal":
        tokens = rng.lognormal(6.5, 1.0, num_samples)
    else:
        tokens = 200 * (1 + rng.pareto(1.2, num_samples))
    tokens = tokens.clip(16, 32_768).astype(np.int64)
    return 24_576 * tokens + tokens**2


def compute_imbalance(work: Work, parts: Sequence[Any]) -> float:
    """Return the work of the busiest rank over the mean, less 1."""
    sums = [int(work[np.asarray(part, np.intp)].sum()) for part in parts]
    return max(sums) / fmean(sums) - 1


def _measure_verl(work: Work, num_ranks: int, *, equal_size: bool) -> tuple[float, float]:
    partition = import_module(_VERL_MODULE).get_seqlen_balanced_partitions
    # verl is quickest with Python's integers; the conversion counts, as it would in a run.
    return _measure(
        work, lambda: partition(work.tolist(), k_partitions=num_ranks, equal_size=equal_size)
    )


def _measure(work: Work, divide: Callable[[], Sequence[Any]]) -> tuple[float, float]:
    """Return the imbalance and the CPU seconds of a division."""
    with timed() as figures:
        parts = divide()
    return compute_imbalance(work, parts), figures["cpu_s"]


def check_aims(rows: Sequence[Row]) -> list[str]:
    """Compare evenness and speed with verl's, where verl was measured."""
    compared = [row for row in rows if "verl" in row]
    worse: list[str] = []
    speedups: dict[str, list[float]] = defaultdict(list)
    for row in compared:
        limit = max(row["verl"], BOUNDS[row["counts"]].get("tolerance", 0.0))
        # Two imbalances are alike if they differ by no more.
        if row["ours"] > limit + 1e-9:
            worse.append("{samples:,} over {ranks} ({lengths}, {counts})".format_map(row))
        if row["samples"] >= 100_000:
            speedups[row["counts"]].append(row["speedup"])
    lines = [f"aim: as even as verl or more, in {len(compared)} cases ({verdict_on_all(worse)})"]
    for counts, values in speedups.items():
        lines.append(
            f"aim: 20 times as fast as verl from 100,000 sequences on, {counts} counts: "
            f"{min(values):.1f} to {max(values):.1f} times ({verdict(min(values) >= 20)})"
        )
    return lines
