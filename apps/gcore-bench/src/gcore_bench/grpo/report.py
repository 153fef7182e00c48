"""Figures of GRPO steps by contender, gcore's ratios to its peers, aims, table and notes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from rich.table import Table

from gcore_bench.grpo.measure import Step
from gcore_bench.grpo.options import GrpoOptions
from gcore_bench.grpo.workload import FLOOR, Workload
from gcore_bench.harness.processes import Footprint
from gcore_bench.harness.report import Cell, Run, megabytes, ratio, rows_table, verdict

_STAGES = ("gen", "reward", "train", "other")
_AIM_SPEED = {"gcore": 20.0, "gcore-ray": 5.0}
"""Least speed over verl's, by contender."""
_AIM_MEMORY = 1 / 3
"""Most memory over verl's."""


@dataclass(frozen=True, kw_only=True)
class StepRun(Run):
    """One contender in one round."""

    footprint: Footprint
    steps: list[Step]
    """The measured steps."""


Line = dict[str, Any]
"""Figures of one contender over all rounds. Seconds are medians over all measured steps of all rounds; ``cpu_s`` is
None for several processes; ``peak_pss_bytes`` is of the process and all that it started, the highest of all rounds."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All contenders of a workload, and how much faster gcore is than each peer."""

    lines: list[Line]
    floor: Line | None
    speed_ratios: dict[str, dict[str, float]]
    """Samples a second of a gcore contender over those of a peer: [gcore contender][peer]."""
    cpu_ratios: dict[str, dict[str, float]]
    """CPU seconds a step of the peer over gcore's, which depend less on other work on the cores."""
    load: float
    """Mean load of the machine before the runs."""


def summarise_steps(runs: Sequence[StepRun]) -> Summary:
    """Take medians over all rounds, and their ratios."""
    names = list(dict.fromkeys(run.contender for run in runs))
    by_name = {name: _line(name, [run for run in runs if run.contender == name]) for name in names}
    floor = by_name.pop(FLOOR, None)
    return Summary(
        lines=list(by_name.values()),
        floor=floor,
        speed_ratios=_ratios(by_name, "step_s"),
        cpu_ratios=_ratios(by_name, "cpu_s"),
        load=fmean(run.load for run in runs),
    )


def _ratios(lines: Mapping[str, Line], metric: str) -> dict[str, dict[str, float]]:
    """Return a figure of each peer over that of each contender of ours, where both have it."""
    found = {name: line[metric] for name, line in lines.items() if line[metric] is not None}
    peers = [name for name in found if not name.startswith("gcore")]
    return {ours: {peer: found[peer] / found[ours] for peer in peers} for ours in found if ours not in peers}


def _line(contender: str, runs: Sequence[StepRun]) -> Line:
    steps = [step | {"other_s": _other_s(step)} for run in runs for step in run.steps]
    step_s, num_samples = median(step["wall_s"] for step in steps), steps[0]["num_samples"]
    cpu_s = [step["cpu_s"] for step in steps if step["cpu_s"] is not None]
    return {
        "contender": contender,
        "num_steps": len(steps),
        "samples_per_step": num_samples,
        "samples_per_s": num_samples / step_s,
        "step_s": step_s,
        **{f"{stage}_s": median(step[f"{stage}_s"] for step in steps) for stage in _STAGES},
        "cpu_s": median(cpu_s) if cpu_s else None,
        "peak_pss_bytes": max(run.footprint.pss_bytes for run in runs),
        "num_processes": max(run.footprint.num_processes for run in runs),
        "mean_length": fmean(step["mean_length"] for step in steps),
        "max_length": max(step["max_length"] for step in steps),
        "score": fmean(step["score"] for step in steps),
    }


def _other_s(step: Step) -> float:
    """Return the time for advantages, batches and bookkeeping."""
    return step["wall_s"] - step["gen_s"] - step["reward_s"] - step["train_s"]


def aims(workload: Workload, lines: Sequence[Line]) -> list[str]:
    """Return a line for each contender of ours that has an aim, if the peer of the aim ran."""
    by_name = {line["contender"]: line for line in lines}
    found: list[str] = []
    if workload.aim_over_trl and by_name.keys() >= {"gcore", "trl"}:
        speed, least = by_name["trl"]["step_s"] / by_name["gcore"]["step_s"], workload.aim_over_trl
        found.append(f"gcore / trl: {speed:.2f}x the speed (aim: at least {least:.1f}x, {verdict(speed >= least)})")
    for name, least in _AIM_SPEED.items():
        if by_name.keys() >= {"verl", name}:
            ours, verl = by_name[name], by_name["verl"]
            speed, memory = verl["step_s"] / ours["step_s"], ours["peak_pss_bytes"] / verl["peak_pss_bytes"]
            found.append(
                f"{name} / verl: {speed:.1f}x the speed (aim: at least {least:.0f}x, {verdict(speed >= least)}), "
                f"{memory:.2f} of the memory (aim: at most {_AIM_MEMORY:.2f}, {verdict(memory <= _AIM_MEMORY)})"
            )
    return found


def table(workload: Workload, summary: Summary) -> Table:
    """Return a table of the contenders, the floor, gcore's ratio to each peer, and the aims."""
    rows = {line["contender"]: line for line in summary.lines}
    if summary.floor is not None:
        rows["floor"] = summary.floor | {"score": None}
    columns = [
        ("samples/s", _cell("samples_per_s", ",.0f")),
        *((f"{stage} s", _cell(f"{stage}_s", ".3f")) for stage in ("step", *_STAGES)),
        ("CPU s", _cell("cpu_s", ".3f")),
        ("peak MB", megabytes("peak_pss_bytes")),
        ("processes", _cell("num_processes", "d")),
        ("length mean/max", lambda row: f"{row['mean_length']:.1f} / {row['max_length']}"),
        ("score", _cell("score", ".3f")),
    ]
    title = f"{workload.name}: {workload.description}, {workload.samples_per_step} completions a step"
    shown = rows_table(title, rows, columns)
    caption = f"medians of {summary.lines[0]['num_steps']} steps; load of the machine {summary.load:.1f}"
    shown.caption = "\n".join([caption, *aims(workload, summary.lines)])
    shown.rows[len(summary.lines) - 1].end_section = True
    for ours, ratios in summary.speed_ratios.items():
        shown.add_section()
        for peer, speed in ratios.items():
            cpu = summary.cpu_ratios.get(ours, {}).get(peer)
            shown.add_row(f"{ours} / {peer}", ratio(speed), *[""] * 5, "" if cpu is None else ratio(cpu))
    return shown


def _cell(metric: str, form: str) -> Cell:
    """Return a cell that is empty where there is no figure."""
    return lambda row: "" if row.get(metric) is None else format(row[metric], form)


def notes(options: GrpoOptions) -> list[str]:
    """Return what a reader must know to judge the figures."""
    lines = [
        f"{options.threads} threads, {options.warmup_steps} first steps of every run left out, "
        f"{options.rounds} alternating rounds, new processes for each run.",
        "gen includes tokenizing, detokenizing and the transfer of weights to the engine, other advantages and "
        "bookkeeping; floor is the matrix products of a step alone; peak MB is of all processes, shared pages counted "
        "once.",
    ]
    if "verl" in options.running:
        lines.append(
            "verl runs on a CPU through a platform of ours, with vLLM's parameters left unpacked so that it can load "
            "new ones. As published, it rounds these to bfloat16, and polls every 2 s for its samples."
        )
    if {"verl", "gcore-ray"} & set(options.running):
        lines.append(
            "Seconds of contenders of several processes are from their own metrics; their gen includes rewards."
        )
    if "trl-vllm" in options.running:
        lines.append(
            "trl-vllm runs with its weight transfer corrected: as published it fails on CPU with this vLLM. It samples "
            "in bfloat16, because TRL gives vLLM no dtype; the others use float32. Its importance-sampling correction "
            "is off, which saves it a forward pass a step."
        )
    return lines
