"""The figures as a person reads them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from rich.table import Table

from gcore_bench.rollout.generation import BASES
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.sync import MEMCPY
from gcore_bench.tables import figures_table
from gcore_bench.trainer.summary import Summary


@dataclass(frozen=True, kw_only=True)
class PartSummary:
    """Medians of a part, and their ratios."""

    summary: Summary
    ratios: dict[str, dict[str, float]]
    """By row and metric."""


def tables(found: PartSummary, options: RolloutOptions) -> list[Table]:
    """The part's own."""
    match found.summary.part:
        case "generation":
            shown = [_generation_table(found)]
        case "sync":
            shown = [_sync_table(found), _first_token_table(found)]
        case "forms":
            shown = [_forms_table(found)]
        case _:
            shown = [_sandbox_table(found)]
    shown[-1].caption = f"medians of {options.rounds} rounds; load of the machine {found.summary.load:.1f}"
    return shown


def _generation_table(found: PartSummary) -> Table:
    columns = ("tokens/s", "speed over base", "s", "CPU s", "CPU over base", "tokens", "mean log-prob", "base")
    shown = figures_table("generation", *columns)
    for name, row in found.summary.rows.items():
        ratios = found.ratios.get(name, {})
        shown.add_row(
            name,
            f"{row['tokens_per_s']:,.0f}",
            _ratio(ratios.get("tokens_per_s")),
            f"{row['wall_s']:.2f}",
            f"{row['cpu_s']:.2f}",
            _ratio(ratios.get("cpu_s")),
            f"{row['tokens']:,.0f}",
            f"{row['log_prob']:.4f}",
            BASES.get(name, "-"),
        )
    return shown


def _sync_table(found: PartSummary) -> Table:
    size_mb = found.summary.rows[MEMCPY]["size_bytes"] / 2**20
    columns = (
        "at rest s",
        "over memcpy",
        "before copying s",
        "copying s",
        "samples running s",
        "over memcpy",
        "no token s",
        "over memcpy",
    )
    shown = figures_table(f"new weights, {size_mb:,.0f} MB", *columns)
    for name, row in found.summary.rows.items():
        ratios = found.ratios.get(name, {})
        cells = [_seconds(row, "wall_s"), _ratio(ratios.get("wall_s"))]
        cells += [_seconds(row, "before_copy_s"), _seconds(row, "copy_s")]
        for metric in ("busy_s", "no_token_s"):
            cells += [_seconds(row, metric), _ratio(ratios.get(metric))]
        shown.add_row(name, *cells)
    return shown


def _first_token_table(found: PartSummary) -> Table:
    shown = figures_table("the first token of the new weights", "after s", "old steps", "a step s")
    for name, row in found.summary.rows.items():
        if name != MEMCPY:
            shown.add_row(name, _seconds(row, "first_token_s"), f"{row['old_steps']:.0f}", _seconds(row, "step_s"))
    return shown


def _forms_table(found: PartSummary) -> Table:
    shown = figures_table("weight sync by form", "sent MB", "to encode s", "to apply s", "both over memcpy")
    for name, row in found.summary.rows.items():
        cells = [f"{row['sent_bytes'] / 2**20:,.1f}", _seconds(row, "encode_s"), _seconds(row, "apply_s")]
        shown.add_row(name, *cells, _ratio(found.ratios.get(name, {}).get("wall_s")))
    return shown


def _sandbox_table(found: PartSummary) -> Table:
    cores = os.cpu_count() or 1
    columns = ("ms a call, alone", "over bare", "CPU ms", "over bare", f"ms a call, {cores} at a time", "over bare")
    shown = figures_table("a program that does nothing", *columns)
    for name, row in found.summary.rows.items():
        cells: list[str] = []
        for metric in ("alone_ms", "cpu_ms", "together_ms"):
            cells += [f"{row[metric]:.1f}", _ratio(found.ratios.get(name, {}).get(metric))]
        shown.add_row(name, *cells)
    return shown


def _seconds(row: Mapping[str, float], metric: str) -> str:
    return f"{row[metric]:.3f}" if metric in row else "-"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def notes(options: RolloutOptions) -> list[str]:
    """What a reader must know to judge the figures."""
    lines = [f"{options.threads} threads a process, float32. Ratios are medians of those of each round."]
    if "generation" in options.parts:
        lines.append(
            "generation: samples end at lengths of their own, log-probabilities on. vllm has VLLMEngine's settings and "
            "seeds; transformers pads to the longest. -process: called from another process, whose CPU seconds count."
        )
    if "sync" in options.parts:
        lines.append(
            "sync: no token: from the last step of the old weights to the first of the new ones, less a step, in the "
            "slowest process. First token: the end of the forward pass that makes it, in the quickest process; old "
            "steps: those that still end after the call. files: safetensors, written, not synced, and loaded by the "
            "engine."
        )
    if "forms" in options.parts:
        lines.append(
            "forms: bfloat16 weights; apply: until they are copied into an engine's memory, by way of the mirror. "
            "Deltas: by share of changed elements. store: synced files. broadcast: gloo, applied while it is sent."
        )
    if "sandbox" in options.parts:
        lines.append("sandbox: several at a time: their wall time over the number of calls.")
    return lines
