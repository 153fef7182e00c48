"""Ratios, tables and notes of the bench of rollouts."""

import os
from collections.abc import Mapping, Sequence

from rich.table import Table

from gcore_bench.harness.report import Run, Summary, figure, figures_table, paired_ratio, ratio
from gcore_bench.rollout.generation import BASES
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.sandbox_calls import BARE
from gcore_bench.rollout.sync import MEMCPY

Ratios = Mapping[str, Mapping[str, float]]
"""Ratios by row and metric."""

_OVER = {
    "generation": {"tokens_per_s": "tokens_per_s", "cpu_s": "cpu_s"},
    "sync": dict.fromkeys(("wall_s", "busy_s", "no_token_s", "copy_s"), "wall_s"),
    "forms": {"wall_s": "wall_s"},
    "sandbox": {name: name for name in ("alone_ms", "cpu_ms", "together_ms")},
}
"""Metrics that have a ratio, by part, and the metric of the base that each is divided by."""
_TITLES = {"forms": "weight sync by form", "sandbox": "a program that does nothing"}


def ratios(part: str, runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Return the median ratio of each row to its base, by metric; rows whose base was not measured have none."""
    rows = dict.fromkeys(row for run in runs for row in run.rows)
    base = MEMCPY if part in ("sync", "forms") else BARE
    bases = {row: BASES.get(row) for row in rows} if part == "generation" else dict.fromkeys(rows, base)
    found: dict[str, dict[str, float]] = {}
    for row, base in bases.items():
        if base is None or base == row:
            continue
        values = {metric: paired_ratio(runs, row, base, metric, base_metric=of) for metric, of in _OVER[part].items()}
        found[row] = {metric: value for metric, value in values.items() if value is not None}
    return found


def tables(summary: Summary, ratios: Ratios, options: RolloutOptions) -> list[Table]:
    """Return the tables of a part."""
    if summary.part == "sync":
        size_mb = summary.rows[MEMCPY]["size_bytes"] / 2**20
        shown = [
            _table(f"new weights, {size_mb:,.0f} MB", summary, ratios, _COLUMNS["sync"]),
            _table("the first token of the new weights", summary, ratios, _COLUMNS["first token"], skip=MEMCPY),
        ]
    else:
        shown = [_table(_TITLES.get(summary.part, summary.part), summary, ratios, _COLUMNS[summary.part])]
    shown[-1].caption = f"medians of {options.rounds} rounds; load of the machine {summary.load:.1f}"
    return shown


Column = tuple[str, str, str]
"""Title, metric, and the metric's format: that of a figure, or "x" for the ratio, "MB", or "base" for its name."""


def _table(
    title: str, summary: Summary, ratios: Ratios, columns: Sequence[Column], *, skip: str | None = None
) -> Table:
    shown = figures_table(title, *(title for title, _, _ in columns))
    for name, row in summary.rows.items():
        if name != skip:
            found = ratios.get(name, {})
            shown.add_row(name, *(_cell(name, row, found, metric, form) for _, metric, form in columns))
    return shown


def _cell(name: str, row: Mapping[str, float], found: Mapping[str, float], metric: str, form: str) -> str:
    match form:
        case "x":
            return ratio(found.get(metric))
        case "base":
            return BASES.get(name, "-")
        case "MB":
            return f"{row[metric] / 2**20:,.1f}"
        case _:
            return figure(metric, form)(row)


_COLUMNS: Mapping[str, Sequence[Column]] = {
    "generation": [
        ("tokens/s", "tokens_per_s", ",.0f"),
        ("speed over base", "tokens_per_s", "x"),
        ("s", "wall_s", ".2f"),
        ("CPU s", "cpu_s", ".2f"),
        ("CPU over base", "cpu_s", "x"),
        ("tokens", "tokens", ",.0f"),
        ("mean log-prob", "log_prob", ".4f"),
        ("base", "", "base"),
    ],
    "sync": [
        ("at rest s", "wall_s", ".3f"),
        ("over memcpy", "wall_s", "x"),
        ("before copying s", "before_copy_s", ".3f"),
        ("copying s", "copy_s", ".3f"),
        ("samples running s", "busy_s", ".3f"),
        ("over memcpy", "busy_s", "x"),
        ("no token s", "no_token_s", ".3f"),
        ("over memcpy", "no_token_s", "x"),
    ],
    "first token": [
        ("after s", "first_token_s", ".3f"),
        ("old steps", "old_steps", ".0f"),
        ("a step s", "step_s", ".3f"),
    ],
    "forms": [
        ("sent MB", "sent_bytes", "MB"),
        ("to encode s", "encode_s", ".3f"),
        ("to apply s", "apply_s", ".3f"),
        ("both over memcpy", "wall_s", "x"),
    ],
    "sandbox": [
        ("ms a call, alone", "alone_ms", ".1f"),
        ("over bare", "alone_ms", "x"),
        ("CPU ms", "cpu_ms", ".1f"),
        ("over bare", "cpu_ms", "x"),
        (f"ms a call, {os.cpu_count() or 1} at a time", "together_ms", ".1f"),
        ("over bare", "together_ms", "x"),
    ],
}


def notes(options: RolloutOptions) -> list[str]:
    """Return what a reader must know to judge the figures."""
    lines = [f"{options.threads} threads a process, float32. Ratios are medians of those of each round."]
    if "generation" in options.parts:
        lines.append(
            "generation: each prompt has its own length of samples, log-probabilities on. vllm has VLLMEngine's "
            "settings and seeds; transformers pads to the longest. -process: called from another process, whose CPU "
            "seconds count."
        )
    if "sync" in options.parts:
        lines.append(
            "sync: no token: from the last step of the old weights to the first of the new ones, less a step, in the "
            "slowest process. First token: the end of the forward pass that makes it, in the fastest process; old "
            "steps: those that end after the call. files: safetensors, written, not synced, and loaded by the engine."
        )
    if "forms" in options.parts:
        lines.append(
            "forms: bfloat16 weights; apply: until the mirror has copied them into an engine's memory. Deltas: by "
            "fraction of changed elements. store: synced files. broadcast: gloo, applied while it is sent."
        )
    if "sandbox" in options.parts:
        lines.append("sandbox: several at a time: their wall time over the number of calls.")
    return lines
