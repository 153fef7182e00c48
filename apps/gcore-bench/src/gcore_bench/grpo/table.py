"""The figures as a person reads them."""

from rich.table import Table

from gcore_bench.grpo.aims import aims
from gcore_bench.grpo.options import GrpoOptions
from gcore_bench.grpo.summary import Line, Summary
from gcore_bench.grpo.workload import Workload

_STAGES = ("gen", "reward", "train", "other")


def table(workload: Workload, summary: Summary) -> Table:
    """One workload: a row a contender, the floor, gcore's ratio to each peer, and what was aimed at."""
    caption = f"medians of {summary.lines[0].num_steps} steps; load of the machine {summary.load:.1f}"
    shown = Table(
        title=f"{workload.name}: {workload.description}, {workload.samples_per_step} completions a step",
        caption="\n".join([caption, *map(str, aims(summary.lines))]),
        title_justify="left",
        caption_justify="left",
    )
    shown.add_column("", no_wrap=True)
    columns = ["samples/s", "step s", *(f"{s} s" for s in _STAGES)]
    columns += ["CPU s", "peak MB", "processes", "length mean/max", "score"]
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
            cpu = summary.cpu_ratios.get(ours, {}).get(peer)
            shown.add_row(f"{ours} / {peer}", f"{ratio:.2f}x", *[""] * 5, "" if cpu is None else f"{cpu:.2f}x")
    return shown


def _cells(line: Line) -> list[str]:
    return [
        f"{line.samples_per_s:,.0f}",
        f"{line.step_s:.3f}",
        *(f"{getattr(line, f'{stage}_s'):.3f}" for stage in _STAGES),
        "" if line.cpu_s is None else f"{line.cpu_s:.3f}",
        f"{line.peak_pss_bytes / 2**20:,.0f}",
        str(line.num_processes),
        f"{line.mean_length:.1f} / {line.max_length}",
    ]


def notes(options: GrpoOptions) -> list[str]:
    """What a reader must know to judge the figures."""
    lines = [
        f"{options.threads} threads, {options.warmup_steps} first steps of every run left out, "
        f"{options.rounds} alternating rounds, new processes for each run.",
        "gen holds tokenizing, detokenizing and the weights' way to the engine, other advantages and bookkeeping; "
        "floor is the matrix products of a step alone; peak MB is of all processes, shared pages counted once.",
    ]
    if "verl" in options.running:
        lines.append(
            "verl runs on a CPU through a platform of ours, with vLLM's parameters left unpacked so that it can load "
            "new ones. As published, it rounds these to bfloat16, and looks every 2 s whether its samples are there."
        )
    if {"verl", "gcore-ray"} & set(options.running):
        lines.append(
            "Seconds of contenders of many processes are those of their own metrics; rewards are within gen there."
        )
    if "trl-vllm" in options.running:
        lines.append(
            "trl-vllm runs with its weight transfer corrected: as published it fails on CPU with this vLLM. It samples "
            "in bfloat16, since TRL gives vLLM no dtype; the others use float32. Its importance-sampling correction is "
            "off, which saves it a forward pass a step."
        )
    return lines
