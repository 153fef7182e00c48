"""The results of the studies as Markdown tables."""

from collections.abc import Iterable, Sequence
from statistics import fmean

from gcore_bench.placement.study.payloads import PayloadLoad
from gcore_bench.placement.study.studies import SeededComparison


def study_text(
    drift: Sequence[SeededComparison],
    payloads: Sequence[tuple[float, int, PayloadLoad]],
    predictions: Sequence[tuple[float, Sequence[float], Sequence[float]]],
    breaks: Sequence[SeededComparison],
) -> str:
    """Return all tables: means over seeds, with the least and the most."""
    error_rows = [
        (f"{error:.3g}", _spread(corrected), _spread(uncorrected)) for error, corrected, uncorrected in predictions
    ]
    payload_rows = [
        (
            f"{size / 1e6:g} MB",
            str(n),
            f"{load.seconds:,.1f} s",
            f"{load.held_bytes / 1e9:,.1f} GB",
            f"{load.max_over_mean:.2f}",
        )
        for size, n, load in payloads
    ]
    payload_head = ("payload of a prompt", "controllers", "busiest, a step", "it holds", "max / mean")
    parts = [
        ("Dynamic against the best static split", comparison_table(drift)),
        ("Payloads through controllers", _table(payload_head, payload_rows)),
        (
            "Wrong costs of the judge",
            _table(("believed / true", "split / dynamic, corrected", "split / dynamic, not corrected"), error_rows),
        ),
        ("Conditions broken", comparison_table(breaks)),
    ]
    return "\n".join(f"## {title}\n\n{table}" for title, table in parts)


def comparison_table(comparisons: Iterable[SeededComparison]) -> str:
    """Return a table of the seconds of a step, the gain of dynamic, and idle shares of all device-seconds."""
    head = (
        "devices",
        "trace",
        "steps",
        *("colocated, a step", "best split", "dynamic", "clairvoyant"),
        "colocated / dynamic",
        "split / dynamic",
        "split / clairvoyant",
        *("idle: colocated", "split", "dynamic", "clairvoyant"),
        "points over clairvoyant",
        "moves",
    )
    rows: list[Sequence[str]] = []
    for seeded in comparisons:
        by_strategy = list(zip(*(c.runs for c in seeded), strict=True))
        rows.append(
            (
                f"{seeded[0].num_devices:,}",
                seeded[0].name,
                str(len(seeded[0]["dynamic"].steps)),
                *(f"{fmean(run.step_s for run in runs):,.0f} s" for runs in by_strategy),
                _spread([c["colocated"].seconds / c["dynamic"].seconds for c in seeded]),
                _spread([c["split"].seconds / c["dynamic"].seconds for c in seeded]),
                _spread([c["split"].seconds / c["clairvoyant"].seconds for c in seeded]),
                *(f"{fmean(run.idle_share for run in runs):.1%}" for runs in by_strategy),
                _spread([100 * (c["dynamic"].idle_share - c["clairvoyant"].idle_share) for c in seeded], digits=1),
                f"{fmean(c['dynamic'].num_moves for c in seeded):.0f}",
            )
        )
    return _table(head, rows)


def _spread(values: Sequence[float], *, digits: int = 2) -> str:
    """Format the mean, and the range if there is one."""
    low, mean, high = (f"{value:.{digits}f}" for value in (min(values), fmean(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
