"""Tables and notes of the trainer's bench."""

from collections.abc import Mapping

from rich.table import Table

from gcore_bench.harness.summary import Rows, Summary
from gcore_bench.harness.tables import Cell, figure, figures_table, megabytes, over, rows_table
from gcore_bench.trainer.options import TrainerOptions
from gcore_bench.trainer.workload import Deal


def part_table(summary: Summary, options: TrainerOptions, deals: Mapping[str, Deal]) -> Table:
    """Return the table of any part but tokens."""
    rows = summary.rows
    match summary.part:
        case "step":
            shown = _step_table(rows)
        case "balance":
            shown = _balance_table(rows, deals)
        case "log-probs":
            shown = _log_probs_table(rows)
        case "context":
            shown = _context_table(rows)
        case _:
            columns = [
                ("step s", figure("step_s", ".3f")),
                ("peak MB", megabytes()),
                ("MFU", figure("mfu", ".1%")),
                ("over 45 %", over("mfu", rows["gcore"], "target")),
            ]
            shown = rows_table("packed training in bfloat16", rows, columns)
    shown.caption = f"medians of {options.rounds} rounds of {options.steps}; load of the machine {summary.load:.1f}"
    return shown


def tokens_table(rows: Rows) -> Table:
    """Return the table of the tokens that are computed, and how many of them are needed."""
    columns = [
        ("computed", figure("computed", ",.0f")),
        ("of samples", figure("real_fraction", ".1%")),
        ("needed", figure("needed_fraction", ".1%")),
        ("over shared", over("computed", rows["gcore-shared"])),
    ]
    shown = rows_table("computed tokens", rows, columns)
    shown.caption = "of samples: not padding; needed: neither padding nor a prompt that was computed before"
    return shown


def _step_table(rows: Rows) -> Table:
    base = rows.get("gcore-shared", {})
    columns = [
        ("step s", figure("step_s", ".3f")),
        ("over shared", over("step_s", base)),
        ("CPU s", figure("cpu_s", ".3f")),
        ("over shared", over("cpu_s", base)),
        ("extra MB", megabytes()),
        ("over shared", over("peak_bytes", base)),
        ("tokens", figure("computed_tokens", ",.0f")),
        ("loss", figure("loss", ".5f")),
        ("grad norm", figure("grad_norm", ".4f")),
    ]
    return rows_table("one policy-gradient step", rows, columns)


def _balance_table(rows: Rows, deals: Mapping[str, Deal]) -> Table:
    columns = ("step s", "ratio", "CPU s, slowest", "CPU s, all", "ranks max/mean", "passes max/mean", "passes", "loss")
    shown = figures_table("gcore-shared on 2 FSDP ranks", *columns)
    for name, row in rows.items():
        shown.add_row(
            name,
            f"{row['step_s']:.3f}",
            over("step_s", rows["balanced"])(row),
            f"{row['cpu_s']:.3f}",
            f"{row['total_cpu_s']:.3f}",
            f"{deals[name].rank_imbalance:.3f}",
            f"{deals[name].pass_imbalance:.3f}",
            str(max(len(batches) for batches in deals[name].batches)),
            f"{row['loss']:.5f}",
        )
    return shown


def _log_probs_table(rows: Rows) -> Table:
    columns: list[tuple[str, Cell]] = [
        ("tokens", figure("tokens", ",.0f")),
        ("logits MB", megabytes("logits_bytes")),
        ("extra MB", megabytes()),
        ("over logits", lambda row: f"{row['peak_bytes'] / row['logits_bytes']:.2f}x"),
        ("s", figure("step_s", ".3f")),
        ("CPU s", figure("cpu_s", ".3f")),
        ("mean log-prob", figure("log_probs", ".4f")),
    ]
    ordered = dict(sorted(rows.items(), key=lambda item: -item[1]["tokens"]))
    return rows_table("log-probabilities, forward and backward", ordered, columns)


def _context_table(rows: Rows) -> Table:
    columns: list[tuple[str, Cell]] = [
        ("step s", figure("step_s", ".3f")),
        ("us a token", lambda row: f"{1e6 * row['step_s'] / row['tokens']:,.0f}"),
        ("CPU s, slowest rank", figure("cpu_s", ".3f")),
        ("us a token", lambda row: f"{1e6 * row['cpu_s'] / row['tokens']:,.0f}"),
        ("CPU s, all", figure("total_cpu_s", ".3f")),
        ("extra MB a rank", megabytes()),
        ("loss", figure("loss", ".5f")),
    ]
    ordered = dict(sorted(rows.items(), key=lambda item: item[1]["tokens"]))
    return rows_table("one long sequence, divided among ranks", ordered, columns)


def notes(options: TrainerOptions) -> list[str]:
    """Return what a reader must know to judge the figures."""
    lines = [
        f"{options.threads} threads a process, the same model, tokens, micro-batch limits and AdamW for all, float32 "
        "on the CPU. extra MB: highest resident memory of the process during a step, less that with weights, "
        "gradients and moments allocated."
    ]
    if "step" in options.parts and "verl" in options.contenders:
        lines.append(
            "verl: its log-probabilities and policy loss, on gcore-packed's micro-batches; flash-attention, which has "
            "no CPU kernel, is replaced by torch's kernel, sequence by sequence."
        )
    if "context" in options.parts:
        lines.append(
            "Ranks share the machine's cores: if there are more ranks than cores, the CPU seconds of the slowest "
            "rank are what each would take on a core of its own; the exchange through gloo is included."
        )
    return lines
