"""The part generation: the same samples under every engine, in turn."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import psutil

from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Figures, Rounds, Run
from gcore_bench.rollout.contenders import gcore
from gcore_bench.rollout.local import generation_figures
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.processes import Processes
from gcore_bench.rollout.workload import make_requests, num_tokens, warmup_requests
from gcore_rollout import Engine, EngineProcess, Request

BASES = {
    "gcore-vllm": "vllm",
    "gcore-vllm-process": "vllm",
    "gcore-hf": "transformers",
    "gcore-hf-process": "transformers",
}
"""The contender that each of ours is compared with."""


async def run_rounds(
    options: RolloutOptions, folder: Path, processes: Processes, *, say: Callable[[str], object]
) -> list[Run]:
    """Start and warm up all contenders; then let them take turns.

    Raises:
        BenchError: a contender failed, or made another number of tokens.
    """
    requests, expected = make_requests(options), num_tokens(options)
    rounds = Rounds("generation", options.rounds, say=say)
    async with AsyncExitStack() as stack:
        engines: dict[str, EngineProcess] = {}
        for name in dict.fromkeys(options.contenders):
            engines[name] = await processes.start(name, _factory(name, folder, options))
            stack.push_async_callback(engines[name].close)
            await _measured(name, engines[name], warmup_requests(options), folder)
        for turn in rounds.turns(engines):
            row = await _measured(turn.contender, engines[turn.contender], requests, folder)
            if row["tokens"] != expected:
                raise BenchError(f"{turn.contender} made {row['tokens']:.0f} tokens; the samples have {expected}")
            turn.done({turn.contender: row}, f"{row['tokens_per_s']:,.0f} tokens/s")
    return rounds.runs


def _factory(name: str, folder: Path, options: RolloutOptions) -> Callable[[], Engine]:
    model, output, max_num_seqs = folder / "model", _output(folder, name), options.prompts * options.n
    match name:
        case "vllm":
            return partial(_make_vllm, model, output, max_num_seqs)
        case "transformers":
            return partial(_make_transformers, model, output)
        case "gcore-vllm" | "gcore-hf":
            kind = name.removeprefix("gcore-")
            return partial(gcore.make_local, kind, model, output, max_num_seqs=max_num_seqs)
        case _:
            kind = name.removeprefix("gcore-").removesuffix("-process")
            return partial(gcore.make_engine, kind, model, max_num_seqs=max_num_seqs)


def _make_vllm(model: Path, output: Path, max_num_seqs: int) -> Engine:
    from gcore_bench.rollout.contenders import vllm

    return vllm.make_local(model, output, max_num_seqs=max_num_seqs)


def _make_transformers(model: Path, output: Path) -> Engine:
    from gcore_bench.rollout.contenders import transformers

    return transformers.make_local(model, output)


def _output(folder: Path, name: str) -> Path:
    return folder / f"figures-{name}.json"


async def _measured(name: str, engine: EngineProcess, requests: Sequence[Request], folder: Path) -> Figures:
    """Return the figures of one turn, taken in the engine's process or, for ``-process``, over both processes."""
    try:
        if name.endswith("-process"):
            wall_s, cpu_s = time.perf_counter(), _cpu_s(engine.pid)
            tokens, log_prob_sum = await gcore.collect(engine, requests)
            wall_s, cpu_s = time.perf_counter() - wall_s, _cpu_s(engine.pid) - cpu_s
            return generation_figures(wall_s, cpu_s, tokens, log_prob_sum)
        _output(folder, name).unlink(missing_ok=True)
        await gcore.collect(engine, requests)
    except Exception as error:
        raise BenchError(f"{name} failed: {error}") from error
    return json.loads(_output(folder, name).read_text())


def _cpu_s(pid: int) -> float:
    """Return CPU seconds of that process and this one together."""
    times = psutil.Process(pid).cpu_times()
    return time.process_time() + times.user + times.system
