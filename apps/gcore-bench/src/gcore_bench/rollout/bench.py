"""`gcore-bench rollout`: the parts in turn; engines stay in their processes for all rounds."""

import asyncio
from dataclasses import asdict

from rich.console import Console

from gcore_bench.harness.models import make_model
from gcore_bench.harness.processes import environment, stderr_to
from gcore_bench.harness.report import Session, summarise
from gcore_bench.rollout import generation, sandbox_calls, sync, sync_forms
from gcore_bench.rollout.engines import ENVIRONMENT
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.report import notes, ratios, tables
from gcore_bench.rollout.workload import SYNC_MAX_LENGTH, generation_shape, max_length, sync_shape

_PARTS = {
    "generation": generation.run_rounds,
    "sync": sync.run_rounds,
    "forms": sync_forms.run_rounds,
    "sandbox": sandbox_calls.run_rounds,
}


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
            runs = asyncio.run(_PARTS[part](options, folder, say=session.say))
            summary, found = summarise(part, runs), ratios(part, runs)
            session.add(part, tables=tables(summary, found, options), summary=asdict(summary), ratios=found, runs=runs)
