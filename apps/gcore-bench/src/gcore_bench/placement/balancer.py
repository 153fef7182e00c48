"""The part balancer: long-tailed sequences over ranks, under gcore-placement, verl and random."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from gcore_bench.harness.report import Row, figure, figures_table, verdict
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


def run(options: PlacementOptions, *, say: Callable[[str], object]) -> dict[str, Any]:
    """Divide each batch over each number of ranks, for every distribution and kind of counts, the batches ascending.

    Returns:
        ``rows``: work of the busiest rank over the mean with ``ours``, ``verl`` and ``random``, and CPU seconds
        (``ours_s``, ``verl_s``). verl's are None where it was not asked; ours may end within ``tolerance`` of the mean.
    """
    rows: list[Row] = []
    if options.verl_s:
        import_module(_VERL_MODULE)  # which takes seconds, and is not to be timed
    for lengths, ranks, counts in product(options.lengths, options.ranks, options.counts):
        equal, tolerance = counts != "free", options.tolerance if counts == "close" else 0.0
        expected_s, last = 0.0, 1
        for samples in sorted(set(options.samples)):
            work = simulated_work(lengths, samples, seed=options.seed)
            ours, ours_s = _measured(work, partial(balance, work, ranks, equal_count=equal, tolerance=tolerance))
            verl, verl_s, theirs = None, None, "not asked"
            expected_s *= (samples / last) ** _VERL_GROWTH
            if options.verl_s > 0 and expected_s <= options.verl_s:
                # It takes Python's integers, which it is quickest at.
                partition = import_module(_VERL_MODULE).get_seqlen_balanced_partitions
                given = partial(partition, k_partitions=ranks, equal_size=equal)
                verl, verl_s = _measured(work, lambda given=given, work=work: given(work.tolist()))
                theirs = f"{verl:.9f} in {verl_s:.2f} s"
            expected_s, last = np.inf if verl_s is None else verl_s, samples
            shuffled = np.random.default_rng(options.seed).permutation(samples).reshape(ranks, -1)
            row = {"lengths": lengths, "samples": samples, "ranks": ranks, "counts": counts, "ours": ours}
            row |= {"ours_s": ours_s, "verl": verl, "verl_s": verl_s, "random": _ratio(work, list(shuffled))}
            rows.append(row | {"tolerance": tolerance})
            say(
                f"{lengths}, {samples:,} over {ranks}, {counts} counts: {ours:.9f} in {ours_s:.3f} s; "
                f"verl {theirs}; random {row['random']:.3f}"
            )
    return {"rows": rows}


def simulated_work(lengths: str, samples: int, *, seed: int) -> NDArray[np.int64]:
    """Return the work of long-tailed sequences by verl's measure, `calculate_workload`: 24576 L + L^2."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(6.5, 1.0, samples) if lengths == "lognormal" else 200 * (1 + rng.pareto(1.2, samples))
    tokens = drawn.clip(16, _LONGEST).astype(np.int64)
    return 24_576 * tokens + tokens**2


def _measured(work: NDArray[np.int64], partition: Callable[[], Sequence[Any]]) -> tuple[float, float]:
    start_s = time.process_time()
    parts = partition()
    took_s = time.process_time() - start_s
    return _ratio(work, parts), took_s


def _ratio(work: NDArray[np.int64], parts: Sequence[Any]) -> float:
    sums = np.array([int(work[np.asarray(part, dtype=np.intp)].sum()) for part in parts])
    return float(sums.max() / sums.mean())


def table(figures: Mapping[str, Any]) -> Table:
    """Return a table with a line for each batch and number of ranks."""
    columns = ("samples", "ranks", "counts", "ours - 1", "verl - 1", "random - 1", "ours s", "verl s", "faster")
    shown = figures_table("work of the busiest rank over the mean, less 1; CPU seconds", *columns)
    for row in figures["rows"]:
        ratios = ("-" if row[name] is None else f"{row[name] - 1:.1e}" for name in ("ours", "verl", "random"))
        batch = (row["lengths"], f"{row['samples']:,}", str(row["ranks"]), row["counts"])
        faster = "-" if row["verl_s"] is None else f"{row['verl_s'] / row['ours_s']:.1f}x"
        shown.add_row(*batch, *ratios, f"{row['ours_s']:.3f}", figure("verl_s", ".2f")(row), faster)
    return shown


def aims(rows: Sequence[Row]) -> list[str]:
    """Return whether gcore's aims are met, where verl was measured."""
    asked = [row for row in rows if row["verl"] is not None]
    if not asked:
        return []
    worse = [
        f"{row['samples']:,} over {row['ranks']} ({row['lengths']}, {row['counts']})"
        for row in asked
        if row["ours"] > max(row["verl"], 1 + row["tolerance"]) * (1 + PRECISION)
    ]
    even = f"not met: {'; '.join(worse)}" if worse else f"met in all {len(asked)}"
    judged = [row for row in asked if row["samples"] >= JUDGED_SAMPLES]
    faster = {c: [row["verl_s"] / row["ours_s"] for row in judged if row["counts"] == c] for c in get_args(Counts)}
    return [
        f"aim: as even as verl's or more, to {PRECISION:.0e} of the ratio ({even})",
        *(
            f"aim: {AIM_FASTER} times as fast as verl from {JUDGED_SAMPLES:,} sequences on, {counts} counts: "
            f"{min(found):.1f} to {max(found):.1f} times ({verdict(min(found) >= AIM_FASTER)})"
            for counts, found in faster.items()
            if found
        ),
    ]
