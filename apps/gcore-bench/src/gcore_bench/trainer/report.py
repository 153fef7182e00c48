"""Tables and notes of the trainer's bench."""

from collections.abc import Mapping

from rich.table import Table

from gcore_bench.harness.report import Cell, Rows, Summary, figure, megabytes, over, rows_table
from gcore_bench.trainer.options import TrainerOptions
from gcore_bench.trainer.workload import Deal


def part_table(summary: Summary, options: TrainerOptions, deals: Mapping[str, Deal]) -> Table:
    """Return the table of any part but tokens."""
    rows = summary.rows
    match summary.part:
        case "step":
            title, base = "one policy-gradient step", rows.get("gcore-shared", {})
            columns: list[tuple[str, Cell]] = [
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
        case "balance":
            title, base = "gcore-shared on 2 FSDP ranks", rows["balanced"]
            rows = {
                name: {**row, **deals[name].imbalance, "count": deals[name].num_passes} for name, row in rows.items()
            }
            columns = [
                ("step s", figure("step_s", ".3f")),
                ("ratio", over("step_s", base)),
                ("CPU s, slowest", figure("cpu_s", ".3f")),
                ("CPU s, all", figure("total_cpu_s", ".3f")),
                ("ranks max/mean", figure("ranks", ".3f")),
                ("passes max/mean", figure("passes", ".3f")),
                ("passes", figure("count", ".0f")),
                ("loss", figure("loss", ".5f")),
            ]
        case "log-probs":
            title, rows = (
                "log-probabilities, forward and backward",
                dict(sorted(rows.items(), key=lambda item: -item[1]["tokens"])),
            )
            columns = [
                ("tokens", figure("tokens", ",.0f")),
                ("logits MB", megabytes("logits_bytes")),
                ("extra MB", megabytes()),
                ("over logits", lambda row: f"{row['peak_bytes'] / row['logits_bytes']:.2f}x"),
                ("s", figure("step_s", ".3f")),
                ("CPU s", figure("cpu_s", ".3f")),
                ("mean log-prob", figure("log_probs", ".4f")),
            ]
        case "context":
            title, rows = (
                "one long sequence, divided among ranks",
                dict(sorted(rows.items(), key=lambda item: item[1]["tokens"])),
            )
            columns = [
                ("step s", figure("step_s", ".3f")),
                ("us a token", lambda row: f"{1e6 * row['step_s'] / row['tokens']:,.0f}"),
                ("CPU s, slowest rank", figure("cpu_s", ".3f")),
                ("us a token", lambda row: f"{1e6 * row['cpu_s'] / row['tokens']:,.0f}"),
                ("CPU s, all", figure("total_cpu_s", ".3f")),
                ("extra MB a rank", megabytes()),
                ("loss", figure("loss", ".5f")),
            ]
        case _:
            title = "packed training in bfloat16"
            columns = [
                ("step s", figure("step_s", ".3f")),
                ("peak MB", megabytes()),
                ("MFU", figure("mfu", ".1%")),
                ("over 45 %", over("mfu", rows["gcore"], "target")),
            ]
    shown = rows_table(title, rows, columns)
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
