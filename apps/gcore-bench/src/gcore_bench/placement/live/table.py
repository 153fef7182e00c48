"""The live runs as a person reads them."""

from collections.abc import Sequence

from rich.table import Table

from gcore_bench.harness.tables import figures_table
from gcore_bench.placement.live.runs import LiveRow

SHOWN_CAUSES = ("long_tail", "waiting_for_generation", "waiting_for_reward", "waiting_for_weights", "swap")


def live_table(rows: Sequence[LiveRow]) -> Table:
    """A line for each strategy."""
    phases = [f"phase {i} s" for i in range(1, len(rows[0].phase_s) + 1)]
    causes = [f"{name.replace('_', ' ')} %" for name in SHOWN_CAUSES]
    shown = figures_table(
        "real runs on Ray, of the devices that generate and judge",
        "run s",
        *phases,
        "moves",
        "idle %",
        *causes,
        "other %",
    )
    for row in rows:
        rest = row.idle_share - sum(row.shares[name] for name in SHOWN_CAUSES)
        shares = [row.idle_share, *(row.shares[name] for name in SHOWN_CAUSES), rest]
        shown.add_row(
            row.strategy,
            f"{row.seconds:.1f}",
            *(f"{seconds:.1f}" for seconds in row.phase_s),
            f"{row.moved_to_judge} + {row.moved_to_policy}" if row.strategy == "dynamic" else "-",
            *(f"{100 * share:.1f}" for share in shares),
        )
    return shown


def live_aims(rows: Sequence[LiveRow]) -> list[str]:
    """Return whether gcore's aims are met."""
    [dynamic] = [row for row in rows if row.strategy == "dynamic"]
    others = [row for row in rows if row.strategy != "dynamic"]
    moves = min(dynamic.moved_to_judge, dynamic.moved_to_policy)
    fastest, least = min(others, key=lambda row: row.seconds), min(others, key=lambda row: row.idle_share)
    return [
        f"aim: dynamic moves an engine each way ({'met' if moves else 'not met'}), and no request is lost (met: every "
        "step has the samples and scores of all runs)",
        f"aim: dynamic idles less than all static strategies: {dynamic.idle_share:.1%} to {least.idle_share:.1%} "
        f"({least.strategy}; {'met' if dynamic.idle_share < least.idle_share else 'not met'})",
        f"the run takes {fastest.seconds / dynamic.seconds:.2f} times as long with the best static strategy "
        f"({fastest.strategy})",
    ]
