"""`gcore-bench rollout`: the parts in turn; engines stay in their processes for all rounds."""

import asyncio
from dataclasses import asdict
from typing import Any

from rich.console import Console

from gcore_bench.harness.models import make_model
from gcore_bench.harness.processes import environment, stderr_to
from gcore_bench.harness.report import Rounds, Session, summarise
from gcore_bench.rollout import generation, sandbox_calls, sync, sync_forms
from gcore_bench.rollout.engines import ENVIRONMENT
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.report import aims, notes, ratios, tables
from gcore_bench.rollout.workload import SYNC_MAX_LENGTH, generation_shape, max_length, sync_shape

_PARTS = {"generation": generation, "sync": sync, "forms": sync_forms, "sandbox": sandbox_calls}


def run(options: RolloutOptions, console: Console) -> None:
    """Measure, print and write the figures that ``options`` asks for.

    Raises:
        BenchError: a contender failed, or contenders did not do the same work.
    """
    options = options.sized()
    with (
        Session(options, console, notes=notes(options)) as session,
        environment(**ENVIRONMENT, OMP_NUM_THREADS=str(options.threads)),
        stderr_to(session.folder / "log"),
    ):
        folder, seed = session.folder, options.seed
        if "generation" in options.parts:
            make_model(folder / "model", generation_shape(options), max_length=max_length(options), seed=seed)
        if "sync" in options.parts:
            make_model(folder / "sync-model", sync_shape(options), max_length=SYNC_MAX_LENGTH, seed=seed)
        for part in dict.fromkeys(options.parts):
            rounds = Rounds(part, options.rounds, say=session.say)
            asyncio.run(_PARTS[part].measure(options, folder, rounds))
            summary, found = summarise(part, rounds.runs), ratios(part, rounds.runs)
            lines = aims(part, rounds.runs)
            figures: dict[str, Any] = {"summary": asdict(summary), "ratios": found, "runs": rounds.runs, "aims": lines}
            session.add(part, tables=tables(summary, found, options), lines=lines, **figures)
