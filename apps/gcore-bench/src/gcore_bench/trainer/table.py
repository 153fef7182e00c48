"""The figures as a person reads them."""

from collections.abc import Mapping

from rich.table import Table

from gcore_bench.tables import figures_table
from gcore_bench.trainer.options import TrainerOptions
from gcore_bench.trainer.summary import Summary
from gcore_bench.trainer.workload import Deal

Rows = Mapping[str, Mapping[str, float]]


def part_table(summary: Summary, options: TrainerOptions, deals: Mapping[str, Deal]) -> Table:
    """The part's own."""
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
            shown = _mfu_table(rows)
    shown.caption = f"medians of {options.rounds} rounds of {options.steps}; load of the machine {summary.load:.1f}"
    return shown


def tokens_table(rows: Rows) -> Table:
    """Which of the computed tokens are needed."""
    shown = figures_table("computed tokens", "computed", "of samples", "needed", "over shared")
    shared = rows["gcore-shared"]["computed"]
    for name, row in rows.items():
        fractions = (f"{row[key]:.1%}" for key in ("real_fraction", "needed_fraction"))
        shown.add_row(name, f"{row['computed']:,.0f}", *fractions, _ratio(row["computed"], shared))
    shown.caption = "of samples: not padding; needed: neither padding nor a prompt that was computed before"
    return shown


def _step_table(rows: Rows) -> Table:
    columns = (
        "step s",
        "over shared",
        "CPU s",
        "over shared",
        "extra MB",
        "over shared",
        "tokens",
        "loss",
        "grad norm",
    )
    shown = figures_table("one policy-gradient step", *columns)
    base = rows.get("gcore-shared", {})
    for name, row in rows.items():
        cells: list[str] = []
        for metric, text in (
            ("step_s", f"{row['step_s']:.3f}"),
            ("cpu_s", f"{row['cpu_s']:.3f}"),
            ("peak_bytes", _mb(row)),
        ):
            cells += [text, _ratio(row[metric], base.get(metric))]
        shown.add_row(name, *cells, f"{row['computed_tokens']:,.0f}", f"{row['loss']:.5f}", f"{row['grad_norm']:.4f}")
    return shown


def _balance_table(rows: Rows, deals: Mapping[str, Deal]) -> Table:
    columns = ("step s", "ratio", "CPU s, slowest", "CPU s, all", "ranks max/mean", "passes max/mean", "passes", "loss")
    shown = figures_table("gcore-shared on 2 FSDP ranks", *columns)
    base = rows["balanced"]
    for name, row in rows.items():
        found = deals[name]
        shown.add_row(
            name,
            f"{row['step_s']:.3f}",
            _ratio(row["step_s"], base["step_s"]),
            f"{row['cpu_s']:.3f}",
            f"{row['total_cpu_s']:.3f}",
            f"{found.rank_imbalance:.3f}",
            f"{found.pass_imbalance:.3f}",
            str(max(len(batches) for batches in found.batches)),
            f"{row['loss']:.5f}",
        )
    return shown


def _log_probs_table(rows: Rows) -> Table:
    columns = ("tokens", "logits MB", "extra MB", "over logits", "s", "CPU s", "mean log-prob")
    shown = figures_table("log-probabilities, forward and backward", *columns)
    for name, row in sorted(rows.items(), key=lambda item: -item[1]["tokens"]):
        shown.add_row(
            name,
            f"{row['tokens']:,.0f}",
            f"{row['logits_bytes'] / 2**20:,.0f}",
            _mb(row),
            _ratio(row["peak_bytes"], row["logits_bytes"]),
            f"{row['step_s']:.3f}",
            f"{row['cpu_s']:.3f}",
            f"{row['log_probs']:.4f}",
        )
    return shown


def _context_table(rows: Rows) -> Table:
    columns = ("step s", "us a token", "CPU s, slowest rank", "us a token", "CPU s, all", "extra MB a rank", "loss")
    shown = figures_table("one long sequence, divided among ranks", *columns)
    for name, row in sorted(rows.items(), key=lambda item: item[1]["tokens"]):
        shown.add_row(
            name,
            f"{row['step_s']:.3f}",
            f"{1e6 * row['step_s'] / row['tokens']:,.0f}",
            f"{row['cpu_s']:.3f}",
            f"{1e6 * row['cpu_s'] / row['tokens']:,.0f}",
            f"{row['total_cpu_s']:.3f}",
            _mb(row),
            f"{row['loss']:.5f}",
        )
    return shown


def _mfu_table(rows: Rows) -> Table:
    shown = figures_table("packed training in bfloat16", "step s", "peak MB", "MFU", "over 45 %")
    for name, row in rows.items():
        shown.add_row(name, f"{row['step_s']:.3f}", _mb(row), f"{row['mfu']:.1%}", _ratio(row["mfu"], row["target"]))
    return shown


def _mb(row: Mapping[str, float]) -> str:
    return f"{row['peak_bytes'] / 2**20:,.0f}"


def _ratio(value: float, base: float | None) -> str:
    return f"{value / base:.2f}x" if base else "-"


def notes(options: TrainerOptions) -> list[str]:
    """What a reader must know to judge the figures."""
    lines = [
        f"{options.threads} threads a process, the same model, tokens, micro-batch limits and AdamW for all, float32 "
        "on the CPU. extra MB: highest resident memory of the process during a step, over that with weights, "
        "gradients and moments made.",
    ]
    if "step" in options.parts and "verl" in options.contenders:
        lines.append(
            "verl: its log-probabilities and policy loss, on gcore-packed's micro-batches; flash-attention, which the "
            "CPU lacks, is replaced by torch's kernel, sequence by sequence."
        )
    if "context" in options.parts:
        lines.append(
            "Ranks share the machine's cores: where there are more ranks than cores, the CPU seconds of the slowest "
            "rank say what each would take on a core of its own; the exchange through gloo is among them."
        )
    return lines
