"""What the studies found, as Markdown."""

from collections.abc import Iterable, Sequence

from gcore_placement.simulation.payloads import PayloadLoad
from gcore_placement.simulation.simulator import StrategyRun
from gcore_placement.simulation.studies import Comparison


def study_text(
    drift: Sequence[Comparison],
    payloads: Sequence[tuple[float, int, PayloadLoad]],
    predictions: tuple[StrategyRun, Sequence[tuple[float, StrategyRun, StrategyRun]]],
    breaks: Sequence[Comparison],
) -> str:
    """All tables."""
    split, errors = predictions
    error_rows = [
        (f"{error:.3g}", _gain(split, corrected), _gain(split, uncorrected)) for error, corrected, uncorrected in errors
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


def comparison_table(comparisons: Iterable[Comparison]) -> str:
    """Seconds of a step, what dynamic gains, and idle shares."""
    head = (
        "devices",
        "trace",
        "colocated",
        "best split",
        "dynamic",
        "clairvoyant",
        "colocated / dynamic",
        "split / dynamic",
        "split / clairvoyant",
        "idle: colocated",
        "split",
        "dynamic",
        "clairvoyant",
        "moves",
    )
    rows = [
        (
            f"{c.num_devices:,}",
            c.name,
            *(f"{run.step_s:,.0f} s" for run in c.runs),
            _gain(c.colocated, c.dynamic),
            _gain(c.best_split, c.dynamic),
            _gain(c.best_split, c.clairvoyant),
            *(f"{run.idle_share:.1%}" for run in c.runs),
            str(c.dynamic.num_moves),
        )
        for c in comparisons
    ]
    return _table(head, rows)


def _gain(slower: StrategyRun, faster: StrategyRun) -> str:
    return f"{slower.seconds / faster.seconds:.3f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
