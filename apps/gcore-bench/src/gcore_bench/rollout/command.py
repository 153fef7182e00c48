"""`gcore-bench rollout`: all parts, their tables, and the file with every figure."""

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console

from gcore_bench.figures_file import write_figures
from gcore_bench.rollout import generation, sandbox_calls, sync
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.processes import Processes, quiet_surroundings
from gcore_bench.rollout.setup import make_models
from gcore_bench.rollout.summary import ratios
from gcore_bench.rollout.table import PartSummary, notes, tables
from gcore_bench.trainer.figures import Run
from gcore_bench.trainer.summary import summarise


def run(options: RolloutOptions, console: Console) -> None:
    """Measure, print, and write what ``options`` asks for.

    Raises:
        BenchError: a contender failed, or contenders did not do the same.
    """
    options = options.sized()
    say = partial(console.print, markup=False, soft_wrap=True)
    results: list[dict[str, object]] = []
    with (
        tempfile.TemporaryDirectory(prefix="gcore-bench-") as scratch,
        quiet_surroundings(Path(scratch) / "log", threads=options.threads),
    ):
        asyncio.run(_measure(options, Path(scratch), console, say, results))
    for note in notes(options):
        console.print(note, soft_wrap=True)
    write_figures(options.json, options, results)


async def _measure(
    options: RolloutOptions,
    folder: Path,
    console: Console,
    say: Callable[[str], object],
    results: list[dict[str, object]],
) -> None:
    with_vllm = "generation" in options.parts and any("vllm" in name for name in options.contenders)
    processes = Processes(threads=options.threads, with_vllm=with_vllm)
    if {"generation", "sync"} & set(options.parts):
        maker = await processes.start("the model", partial(make_models, folder, options))
        await maker.close()
    for part in dict.fromkeys(options.parts):
        match part:
            case "generation":
                runs = await generation.run_rounds(options, folder, processes, say=say)
            case "sync":
                runs = await sync.run_rounds(options, folder, processes, say=say)
            case "forms":
                from gcore_bench.rollout import sync_forms

                runs = await sync_forms.run_rounds(options, folder, say=say)
            case "sandbox":
                runs = await sandbox_calls.run_rounds(options, say=say)
        found = _summary(part, runs)
        for table in tables(found, options):
            console.print(table)
        results.append({"part": part, **asdict(found), "runs": [asdict(run) for run in runs]})


def _summary(part: str, runs: list[Run]) -> PartSummary:
    summary = summarise(part, runs)
    match part:
        case "generation":
            bases = {name: base for name, base in generation.BASES.items() if name in summary.rows}
        case "sync" | "forms":
            bases = {name: sync.MEMCPY for name in summary.rows if name != sync.MEMCPY}
        case _:
            bases = {name: sandbox_calls.BARE for name in summary.rows if name != sandbox_calls.BARE}
    return PartSummary(summary=summary, ratios=ratios(part, runs, bases))
