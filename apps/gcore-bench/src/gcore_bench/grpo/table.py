"""The figures as a person reads them."""

from rich.table import Table

from gcore_bench.grpo.options import GrpoOptions
from gcore_bench.grpo.summary import Line, Summary
from gcore_bench.grpo.workload import Workload

_STAGES = ("gen", "reward", "train", "other")


def table(workload: Workload, summary: Summary) -> Table:
    """One workload: a row a contender, the floor, and gcore's ratio to each peer."""
    shown = Table(
        title=f"{workload.name}: {workload.description}, {workload.samples_per_step} completions a step",
        caption=f"medians of {summary.lines[0].num_steps} steps; load of the machine {summary.load:.1f}",
        title_justify="left",
        caption_justify="left",
    )
    shown.add_column("", no_wrap=True)
    columns = ("samples/s", "step s", *(f"{s} s" for s in _STAGES), "CPU s", "peak MB", "length mean/max", "score")
    for column in columns:
        shown.add_column(column, justify="right")
    for line in summary.lines:
        shown.add_row(line.contender, *_cells(line), f"{line.score:.3f}")
    if summary.floor is not None:
        shown.add_section()
        shown.add_row("floor", *_cells(summary.floor), "")
    for ours, ratios in summary.speed_ratios.items():
        shown.add_section()
        for peer, ratio in ratios.items():
            cpu = summary.cpu_ratios[ours][peer]
            shown.add_row(f"{ours} / {peer}", f"{ratio:.2f}x", *[""] * 5, f"{cpu:.2f}x", *[""] * 3)
    return shown


def _cells(line: Line) -> list[str]:
    return [
        f"{line.samples_per_s:,.0f}",
        f"{line.step_s:.3f}",
        *(f"{getattr(line, f'{stage}_s'):.3f}" for stage in _STAGES),
        f"{line.cpu_s:.3f}",
        f"{line.peak_rss_bytes / 2**20:,.0f}",
        f"{line.mean_length:.1f} / {line.max_length}",
    ]


def notes(options: GrpoOptions) -> list[str]:
    """What a reader must know to judge the figures."""
    lines = [
        f"{options.threads} threads, {options.warmup_steps} first steps of every run left out, "
        f"{options.rounds} alternating rounds, a process for each run.",
        "gen holds tokenizing, detokenizing and the weights' way to the engine, other advantages and bookkeeping; "
        "floor is the matrix products of a step alone.",
    ]
    if "trl-vllm" in options.contenders:
        lines.append(
            "trl-vllm runs with its weight transfer corrected: as published it fails on CPU with this vLLM. It samples "
            "in bfloat16, since TRL gives vLLM no dtype; the others use float32. Its importance-sampling correction is "
            "off, which saves it a forward pass a step."
        )
    return lines
