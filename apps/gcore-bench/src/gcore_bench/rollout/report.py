"""Ratios, tables and notes of the bench of rollouts."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from gcore_bench.harness.report import Cell, Run, Summary, figure, paired_ratio, ratio, rows_table, verdict
from gcore_bench.rollout.generation import BASES
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.sandbox_calls import BARE
from gcore_bench.rollout.sync import MEMCPY

_ALIKE = 0.97
"""Least speed over the base that counts as no slower."""

_OVER = {
    "generation": {"tokens_per_s": "tokens_per_s", "cpu_s": "cpu_s"},
    "sync": dict.fromkeys(("wall_s", "busy_s", "no_token_s", "copy_s"), "wall_s"),
    "forms": {"wall_s": "wall_s"},
    "sandbox": {name: name for name in ("alone_ms", "cpu_ms", "together_ms")},
}
"""Metrics that have a ratio, by part, and the metric of the base that each is divided by."""


def ratios(part: str, runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Return the median ratio of each row to its base, by metric; rows whose base was not measured have none."""
    found: dict[str, dict[str, float]] = {}
    for row in dict.fromkeys(row for run in runs for row in run.rows):
        base = {"generation": BASES.get(row, row), "sandbox": BARE}.get(part, MEMCPY)
        if base != row:
            over = {name: paired_ratio(runs, row, base, name, base_metric=of) for name, of in _OVER[part].items()}
            found[row] = {name: value for name, value in over.items() if value is not None}
    return found


def aims(part: str, runs: Sequence[Run]) -> list[str]:
    """Return whether `HFEngine` by itself is as fast on CPU as with dynamic shapes, its only ones before 0.8.0."""
    speed = paired_ratio(runs, "gcore-hf", "gcore-hf-dynamic", "tokens_per_s") if part == "generation" else None
    if speed is None:
        return []
    return [
        f"aim: gcore-hf, which chooses its decode mode, is on a tiny model on CPU within 3 % of gcore-hf-dynamic, at "
        f"least {_ALIKE} times as fast: {speed:.2f} ({verdict(speed >= _ALIKE)})"
    ]


def tables(summary: Summary, ratios: Mapping[str, Mapping[str, float]], options: RolloutOptions) -> list[Table]:
    """Return the tables of a part."""
    rows: dict[str, dict[str, Any]] = {
        name: {**row, "base": BASES.get(name, "-"), **{f"{key} ratio": of for key, of in ratios.get(name, {}).items()}}
        for name, row in summary.rows.items()
    }
    match summary.part:
        case "sync":
            size_mb = rows[MEMCPY]["size_bytes"] / 2**20
            updated = {name: row for name, row in rows.items() if name != MEMCPY}
            shown = [
                rows_table(f"new weights, {size_mb:,.0f} MB", rows, _COLUMNS["sync"]),
                rows_table("the first token of the new weights", updated, _COLUMNS["first token"]),
            ]
        case part:
            titles = {"forms": "weight sync by form", "sandbox": "a program that does nothing"}
            shown = [rows_table(titles.get(part, part), rows, _COLUMNS[part])]
    shown[-1].caption = f"medians of {options.rounds} rounds; load of the machine {summary.load:.1f}"
    return shown


def _over(metric: str) -> Cell:
    return lambda row: ratio(row.get(f"{metric} ratio"))


_COLUMNS: Mapping[str, Sequence[tuple[str, Cell]]] = {
    "generation": [
        ("tokens/s", figure("tokens_per_s", ",.0f")),
        ("speed over base", _over("tokens_per_s")),
        ("s", figure("wall_s", ".2f")),
        ("CPU s", figure("cpu_s", ".2f")),
        ("CPU over base", _over("cpu_s")),
        ("tokens", figure("tokens", ",.0f")),
        ("mean log-prob", figure("log_prob", ".4f")),
        ("base", figure("base", "")),
    ],
    "sync": [
        ("at rest s", figure("wall_s", ".3f")),
        ("over memcpy", _over("wall_s")),
        ("before copying s", figure("before_copy_s", ".3f")),
        ("copying s", figure("copy_s", ".3f")),
        ("samples running s", figure("busy_s", ".3f")),
        ("over memcpy", _over("busy_s")),
        ("no token s", figure("no_token_s", ".3f")),
        ("over memcpy", _over("no_token_s")),
    ],
    "first token": [
        ("after s", figure("first_token_s", ".3f")),
        ("old steps", figure("old_steps", ".0f")),
        ("a step s", figure("step_s", ".3f")),
    ],
    "forms": [
        ("sent MB", lambda row: f"{row['sent_bytes'] / 2**20:,.1f}"),
        ("to encode s", figure("encode_s", ".3f")),
        ("to apply s", figure("apply_s", ".3f")),
        ("both over memcpy", _over("wall_s")),
    ],
    "sandbox": [
        ("ms a call, alone", figure("alone_ms", ".1f")),
        ("over bare", _over("alone_ms")),
        ("CPU ms", figure("cpu_ms", ".1f")),
        ("over bare", _over("cpu_ms")),
        (f"ms a call, {os.cpu_count() or 1} at a time", figure("together_ms", ".1f")),
        ("over bare", _over("together_ms")),
    ],
}


def notes(options: RolloutOptions) -> list[str]:
    """Return what a reader must know to judge the figures."""
    lines = [f"{options.threads} threads a process, float32. Ratios are medians of those of each round."]
    if "generation" in options.parts:
        lines.append(
            "generation: each prompt has its own length of samples, log-probabilities on. vllm has VLLMEngine's "
            "settings and seeds; transformers pads to the longest. -process: called from another process, whose CPU "
            "seconds count. -dynamic, -static: decode modes of HFEngine, the latter over the former."
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
            "fraction of changed elements. ranks: processes that write their parts to shared memory, with the bytes of "
            "one; an engine copies them."
        )
    if "sandbox" in options.parts:
        lines.append("sandbox: several at a time: their wall time over the number of calls.")
    return lines
