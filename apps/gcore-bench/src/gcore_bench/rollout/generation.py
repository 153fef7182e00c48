"""The part generation: the same samples under every engine, in turn."""

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Figures, Rounds
from gcore_bench.rollout.engines import collect, make_contender, measured, start_engine
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.workload import make_requests, num_tokens, warmup_requests
from gcore_rollout import Request

BASES = {
    "gcore-vllm": "vllm",
    "gcore-vllm-process": "vllm",
    "gcore-hf": "transformers",
    "gcore-hf-process": "transformers",
    "gcore-hf-static": "gcore-hf-dynamic",
}
"""The contender that each of ours is compared with."""


async def measure(options: RolloutOptions, folder: Path, rounds: Rounds) -> None:
    """Start and warm up all contenders; then let them take turns, in which all must make the same number of tokens."""
    requests, expected = make_requests(options), num_tokens(options)
    async with AsyncExitStack() as stack:
        engines: dict[str, Any] = {}
        for name in dict.fromkeys(options.contenders):
            factory = partial(make_contender, name, folder / "model", options.prompts * options.n)
            engines[name] = await start_engine(name, factory, options, stack)
            await _figures(name, engines[name], warmup_requests(options))
        for turn in rounds.turns(engines):
            row = await _figures(turn.contender, engines[turn.contender], requests)
            if row["tokens"] != expected:
                raise BenchError(f"{turn.contender} made {row['tokens']:.0f} tokens; the samples have {expected}")
            turn.done({turn.contender: row}, f"{row['tokens_per_s']:,.0f} tokens/s")


async def _figures(name: str, engine: Any, requests: Sequence[Request]) -> Figures:
    """Return the figures of one turn, taken in the engine's process or, for ``-process``, over both processes."""
    try:
        if name.endswith("-process"):
            return await measured(partial(collect, engine), requests, partial(_cpu_s, engine.pid))
        (sample,) = [sample async for sample in engine.generate(requests)]
        return sample.figures
    except Exception as error:
        raise BenchError(f"{name} failed: {error}") from error


def _cpu_s(pid: int) -> float:
    """Return CPU seconds of that process and this one together."""
    times = psutil.Process(pid).cpu_times()
    return time.process_time() + times.user + times.system
