"""Rounds of contenders and limits, in turn."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from gcore_bench.ckpt.figures import Run, Spec
from gcore_bench.ckpt.options import CkptOptions
from gcore_bench.ckpt.parts import LIMITS, PARTS
from gcore_bench.ckpt.processes import ContenderError, Outcome, run_processes

_TIMEOUT_S = 300.0
_TIMEOUT_S_PER_GB = 150.0


def run_rounds(part: str, options: CkptOptions, folder: Path, *, say: Callable[[str], object]) -> list[Run]:
    """Run the limits and every contender of a part in turn, ``options.rounds`` times; who fails is passed over."""
    runs: list[Run] = []
    for number in range(1, options.rounds + 1):
        for contender in (*[LIMITS] * PARTS[part].has_limits, *options.contenders_of(part)):
            load = os.getloadavg()[0]
            where = f"{part}, round {number} of {options.rounds}: {contender}"
            try:
                outcome = _run(part, contender, options, folder)
            except ContenderError as error:
                runs.append(Run(contender=contender, round=number, load=load, failure=str(error)))
                say(f"{where} failed: {error}")
                continue
            runs.append(
                Run(
                    contender=contender,
                    round=number,
                    load=load,
                    rows=outcome.rows,
                    peak_extra_bytes=outcome.peak_extra_bytes,
                )
            )
            say(f"{where}: {_in_words(part, contender, outcome)}, load {load:.1f}")
    return runs


def _run(part: str, contender: str, options: CkptOptions, folder: Path) -> Outcome:
    root = folder / "files"
    root.mkdir()
    timeout_s = _TIMEOUT_S + _TIMEOUT_S_PER_GB * options.size_gb
    try:
        saved = run_processes(_specs(part, contender, options, root, "save"), folder, timeout_s=timeout_s)
        if part != "ranks" or not _loads_shards(contender):
            return saved
        loaded = run_processes(_specs(part, contender, options, root, "load"), folder, timeout_s=timeout_s)
        rows = {contender: saved.rows[contender] | loaded.rows[contender]}
        return Outcome(rows=rows, peak_extra_bytes=saved.peak_extra_bytes)
    finally:
        shutil.rmtree(root)


def _loads_shards(contender: str) -> bool:
    """The asynchronous saves of DCP leave what its synchronous ones do."""
    return contender in ("gcore", "dcp")


def _specs(part: str, contender: str, options: CkptOptions, root: Path, phase: str) -> list[Spec]:
    cores = os.cpu_count() or 1
    world_size = {"save": options.ranks, "load": options.ranks // 2}[phase] if part == "ranks" else 1
    threads = 1 if part == "loop" else max(1, cores // world_size)
    store = root.with_name(f"store-{phase}")
    store.unlink(missing_ok=True)
    return [
        Spec(
            part=part,
            contender=contender,
            root=str(root),
            size_bytes=options.size_bytes,
            tensors=options.tensors,
            threads=threads,
            phase=phase,
            rank=rank,
            world_size=world_size,
            store=str(store),
        )
        for rank in range(world_size)
    ]


def _in_words(part: str, contender: str, outcome: Outcome) -> str:
    titles = {column.metric: column.title.removesuffix(" s") for column in PARTS[part].columns}
    shown = ("stall", "durable", "save", "load_cold", "rows_cold", "matmul_saving", "python_saving")
    found = [
        f"{row if row != contender else ''} {titles[metric]} {seconds[metric]:.3f} s".strip()
        for row, seconds in outcome.rows.items()
        for metric in shown
        if metric in seconds
    ]
    return ", ".join(found)
