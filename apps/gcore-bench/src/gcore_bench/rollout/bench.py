"""`gcore-bench rollout`: the parts in turn; engines stay in their processes for all rounds."""

import asyncio
from dataclasses import asdict
from functools import partial

from rich.console import Console

from gcore_bench.harness.processes import environment, stderr_to
from gcore_bench.harness.report import Session, summarise
from gcore_bench.rollout import generation, sandbox_calls, sync
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.processes import ENVIRONMENT, Processes, make_models
from gcore_bench.rollout.report import notes, ratios, tables


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
        asyncio.run(_measure(options, session))


async def _measure(options: RolloutOptions, session: Session) -> None:
    folder, say = session.folder, session.say
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
        summary, found = summarise(part, runs), ratios(part, runs)
        session.add(part, tables=tables(summary, found, options), summary=asdict(summary), ratios=found, runs=runs)
