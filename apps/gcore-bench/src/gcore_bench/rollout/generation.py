"""The part generation: the same samples under every engine, in turn."""

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Figures, Rounds, Run
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.processes import Processes, as_engine, measured
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
        engines: dict[str, EngineProcess[Any, Any]] = {}
        for name in dict.fromkeys(options.contenders):
            factory = partial(_make, name, folder / "model", max_num_seqs=options.prompts * options.n)
            engines[name] = await processes.start(name, factory)
            stack.push_async_callback(engines[name].close)
            await _figures(name, engines[name], warmup_requests(options))
        for turn in rounds.turns(engines):
            row = await _figures(turn.contender, engines[turn.contender], requests)
            if row["tokens"] != expected:
                raise BenchError(f"{turn.contender} made {row['tokens']:.0f} tokens; the samples have {expected}")
            turn.done({turn.contender: row}, f"{row['tokens_per_s']:,.0f} tokens/s")
    return rounds.runs


def _make(name: str, model: Path, *, max_num_seqs: int) -> Engine[Any, Any]:
    """Make a contender in its process, which alone imports its library."""
    if name == "vllm":
        from gcore_bench.rollout.contenders.vllm import VLLM

        return as_engine(VLLM(model, max_num_seqs=max_num_seqs).generate)
    if name == "transformers":
        from gcore_bench.rollout.contenders.transformers import Transformers

        return as_engine(Transformers(model).generate)
    if "hf" in name:
        from gcore_rollout import HFEngine as Kind
    else:
        from gcore_rollout import VLLMEngine as Kind

    engine = Kind.from_pretrained(model, max_num_seqs=max_num_seqs, eos_token_ids=[])
    return engine if name.endswith("-process") else as_engine(partial(_collect, engine))


async def _collect(engine: Engine, requests: Sequence[Request]) -> tuple[int, float]:
    """Return the number of tokens, and the sum of their log-probabilities."""
    completions = [completion async for completion in engine.generate(requests)]
    return sum(c.token_ids.size for c in completions), sum(float(c.log_probs.sum()) for c in completions)


async def _figures(name: str, engine: EngineProcess[Any, Any], requests: Sequence[Request]) -> Figures:
    """Return the figures of one turn, taken in the engine's process or, for ``-process``, over both processes."""
    try:
        if name.endswith("-process"):
            return await measured(partial(_collect, engine), requests, partial(_cpu_s, engine.pid))
        (sample,) = [sample async for sample in engine.generate(requests)]
        return sample.figures
    except Exception as error:
        raise BenchError(f"{name} failed: {error}") from error


def _cpu_s(pid: int) -> float:
    """Return CPU seconds of that process and this one together."""
    times = psutil.Process(pid).cpu_times()
    return time.process_time() + times.user + times.system
