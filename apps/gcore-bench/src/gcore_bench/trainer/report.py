"""Tables, aims and notes of the trainer's bench."""

from collections.abc import Mapping

from rich.table import Table

from gcore_bench.harness.report import Cell, Rows, Summary, figure, megabytes, over, ratio, rows_table, verdict
from gcore_bench.trainer.options import TrainerOptions
from gcore_bench.trainer.workload import Deal, equal_workload, lognormal_workload, memory_lengths, too_large_masks

_LINEAR = 2.25
"""Most growth of memory, from one length to twice that length, that counts as linear."""
_FASTER = 1.3
"""Least speed of tiles over that of masks, for lognormal lengths."""
_ALIKE = 0.95
"""The same for other lengths: not slower, but for noise."""


def part_table(summary: Summary, options: TrainerOptions, deals: Mapping[str, Deal]) -> Table:
    """Return the table of any part but tokens."""
    rows, base = summary.rows, {}
    step_s, loss, cpu_s = figure("step_s", ".3f"), figure("loss", ".5f"), figure("cpu_s", ".3f")
    all_cpu_s = figure("total_cpu_s", ".3f")
    if summary.part == "balance":
        rows = {name: {**row, **deals[name].imbalance, "count": deals[name].num_passes} for name, row in rows.items()}
        base = rows["balanced"]
    elif summary.part == "step":
        base = rows.get("gcore-shared", {})
    elif summary.part == "memory":
        rows = _with_ratios(rows)
    elif summary.part in ("log-probs", "context"):
        sign = 1 if summary.part == "context" else -1
        rows = dict(sorted(rows.items(), key=lambda item: sign * item[1]["tokens"]))
    titles = {
        "step": "one policy-gradient step",
        "balance": "gcore-shared on 2 FSDP ranks",
        "log-probs": "log-probabilities, forward and backward",
        "context": "one long sequence, divided among ranks",
        "memory": "eight responses to one prompt",
        "mfu": "packed training in bfloat16",
    }
    columns: dict[str, list[tuple[str, Cell]]] = {
        "step": [
            ("step s", step_s),
            ("over shared", over("step_s", base)),
            ("CPU s", cpu_s),
            ("over shared", over("cpu_s", base)),
            ("extra MB", megabytes()),
            ("over shared", over("peak_bytes", base)),
            ("tokens", figure("computed_tokens", ",.0f")),
            ("loss", loss),
            ("grad norm", figure("grad_norm", ".4f")),
        ],
        "balance": [
            ("step s", step_s),
            ("ratio", over("step_s", base)),
            ("CPU s, slowest", cpu_s),
            ("CPU s, all", all_cpu_s),
            ("ranks max/mean", figure("ranks", ".3f")),
            ("passes max/mean", figure("passes", ".3f")),
            ("passes", figure("count", ".0f")),
            ("loss", loss),
        ],
        "log-probs": [
            ("tokens", figure("tokens", ",.0f")),
            ("logits MB", megabytes("logits_bytes")),
            ("extra MB", megabytes()),
            ("over logits", lambda row: f"{row['peak_bytes'] / row['logits_bytes']:.2f}x"),
            ("s", step_s),
            ("CPU s", cpu_s),
            ("mean log-prob", figure("log_probs", ".4f")),
        ],
        "context": [
            ("step s", step_s),
            ("us a token", lambda row: f"{1e6 * row['step_s'] / row['tokens']:,.0f}"),
            ("CPU s, slowest rank", cpu_s),
            ("us a token", lambda row: f"{1e6 * row['cpu_s'] / row['tokens']:,.0f}"),
            ("CPU s, all", all_cpu_s),
            ("extra MB a rank", megabytes()),
            ("loss", loss),
        ],
        "memory": [
            ("extra MB", megabytes()),
            ("over half the length", lambda row: ratio(row.get("growth"))),
            ("over tiles", lambda row: ratio(row["peak_bytes_over_tiles"])),
            ("step s", step_s),
            ("over tiles", lambda row: ratio(row["step_s_over_tiles"])),
            ("CPU s", cpu_s),
            ("over tiles", lambda row: ratio(row["cpu_s_over_tiles"])),
            ("loss", loss),
        ],
        "mfu": [
            ("step s", step_s),
            ("peak MB", megabytes()),
            ("MFU", figure("mfu", ".1%")),
            ("over 45 %", lambda row: ratio(row["mfu"], row["target"])),
        ],
    }
    shown = rows_table(titles[summary.part], rows, columns[summary.part])
    shown.caption = f"medians of {options.rounds} rounds of {options.steps}; load of the machine {summary.load:.1f}"
    return shown


def _with_ratios(rows: Rows) -> Rows:
    """Return the rows of the part memory with their ratios: to half the length, whose aim is 2, and to tiles."""
    found: Rows = {}
    for name, row in rows.items():
        workload, contender = name.rsplit(" ", 1)
        tiles = rows[f"{workload} tiles"]
        ratios = {f"{metric}_over_tiles": row[metric] / tiles[metric] for metric in ("peak_bytes", "step_s", "cpu_s")}
        # Eight responses of half the length, if they were measured.
        half = rows.get(f"{equal_workload(int(row['tokens']) // 16)} {contender}")
        if half and workload == equal_workload(int(row["tokens"]) // 8):
            ratios["growth"] = row["peak_bytes"] / half["peak_bytes"]
        found[name] = {**row, **ratios}
    return found


def aims(summary: Summary, options: TrainerOptions) -> list[str]:
    """Return whether gcore's aims for attention without masks are met, and which masks are not measured and why."""
    rows = summary.rows
    if summary.part == "step" and {"gcore-masks", "gcore-shared"} <= rows.keys():
        speed = rows["gcore-masks"]["step_s"] / rows["gcore-shared"]["step_s"]
        return [_speed_aim("gcore-shared", "gcore-masks", "the lengths of this part", speed, _ALIKE)]
    if summary.part != "memory":
        return []
    workloads, rows = memory_lengths(options), _with_ratios(rows)
    grown = {name: growth for name in workloads if (growth := rows[f"{name} tiles"].get("growth"))}
    speeds = {name: row["step_s_over_tiles"] for name in workloads if (row := rows.get(f"{name} masks"))}
    lines = [
        f"aim: the memory of tiles at {name} is about 2 times that at half the length (linear), at most {_LINEAR} "
        f"times: {growth:.2f} ({verdict(growth <= _LINEAR)})"
        for name, growth in grown.items()
    ]
    lognormal = lognormal_workload(options)
    lines += [
        _speed_aim("tiles", "masks", name, speed, _FASTER if name == lognormal else _ALIKE)
        for name, speed in speeds.items()
    ]
    return lines + [
        f"left out: masks at {name}, of which one takes {gb:.2g} GB; expected at most --max-mask-gb, "
        f"{options.max_mask_gb:g}"
        for name, gb in too_large_masks(options).items()
    ]


def _speed_aim(ours: str, masked: str, workload: str, speed: float, least: float) -> str:
    how = "no slower than" if least < 1 else "faster than"
    return (
        f"aim: a step of {ours} is {how} one of {masked} at {workload}, at least {least} times as fast: {speed:.2f} "
        f"({verdict(speed >= least)})"
    )


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
