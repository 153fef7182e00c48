"""The part generation: the same samples under every engine, in turn."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Figures, Rounds, Run
from gcore_bench.rollout.engines import start_engine
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.workload import make_requests, num_tokens, warmup_requests
from gcore_rollout import AnySample, Engine, EngineStats, Request, engine_kind

BASES = {
    "gcore-vllm": "vllm",
    "gcore-vllm-process": "vllm",
    "gcore-hf": "transformers",
    "gcore-hf-process": "transformers",
}
"""The contender that each of ours is compared with."""

Generate = Callable[[Sequence[Request]], Awaitable[tuple[int, float]]]
"""Generates completions, and returns the number of their tokens and the sum of their log-probabilities."""


async def run_rounds(options: RolloutOptions, folder: Path, *, say: Callable[[str], object]) -> list[Run]:
    """Start and warm up all contenders; then let them take turns.

    Raises:
        BenchError: a contender failed, or made another number of tokens.
    """
    requests, expected = make_requests(options), num_tokens(options)
    rounds = Rounds("generation", options.rounds, say=say)
    async with AsyncExitStack() as stack:
        engines: dict[str, Any] = {}
        for name in dict.fromkeys(options.contenders):
            factory = partial(_make, name, folder / "model", options.prompts * options.n)
            engines[name] = await start_engine(name, factory, options, stack)
            await _figures(name, engines[name], warmup_requests(options))
        for turn in rounds.turns(engines):
            row = await _figures(turn.contender, engines[turn.contender], requests)
            if row["tokens"] != expected:
                raise BenchError(f"{turn.contender} made {row['tokens']:.0f} tokens; the samples have {expected}")
            turn.done({turn.contender: row}, f"{row['tokens_per_s']:,.0f} tokens/s")
    return rounds.runs


def _make(name: str, model: Path, max_num_seqs: int) -> Any:
    """Make a contender in its process, which alone imports its library."""
    match name:
        case "vllm":
            from gcore_bench.rollout.contenders.vllm import VLLM

            return _MeasuredEngine(VLLM(model, max_num_seqs=max_num_seqs).generate)
        case "transformers":
            from gcore_bench.rollout.contenders.transformers import Transformers

            return _MeasuredEngine(Transformers(model).generate)
        case _:
            kind = engine_kind(name.split("-")[1])
            engine = kind.load().from_pretrained(model, max_num_seqs=max_num_seqs, eos_token_ids=[])
            return engine if name.endswith("-process") else _MeasuredEngine(partial(_collect, engine))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Measured(AnySample):
    """The figures of a `generate` whose completions stayed in their process."""

    figures: Figures


class _MeasuredEngine:
    """The part of an engine that an `EngineProcess` needs; it yields a `_Measured` in place of completions."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate

    def stats(self) -> EngineStats:
        return EngineStats(prompt_tokens=0, completion_tokens=0, num_running=0, num_waiting=0, weight_version=0)

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[_Measured]:
        figures = await _measured(self._generate, requests, time.process_time)
        yield _Measured(request_id="", index=0, finish_reason="stop", figures=figures)

    async def close(self) -> None:
        """Do nothing, because the process ends next."""


async def _figures(name: str, engine: Any, requests: Sequence[Request]) -> Figures:
    """Return the figures of one turn, taken in the engine's process or, for ``-process``, over both processes."""
    try:
        if name.endswith("-process"):
            process = psutil.Process(engine.pid)
            return await _measured(partial(_collect, engine), requests, lambda: _cpu_s(process))
        (sample,) = [sample async for sample in engine.generate(requests)]
        return sample.figures
    except Exception as error:
        raise BenchError(f"{name} failed: {error}") from error


async def _measured(generate: Generate, requests: Sequence[Request], cpu_time_s: Callable[[], float]) -> Figures:
    wall_s, cpu_s = time.perf_counter(), cpu_time_s()
    tokens, log_prob_sum = await generate(requests)
    wall_s, cpu_s = time.perf_counter() - wall_s, cpu_time_s() - cpu_s
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "tokens": float(tokens),
        "tokens_per_s": tokens / wall_s,
        "log_prob": log_prob_sum / tokens,
    }


async def _collect(engine: Engine, requests: Sequence[Request]) -> tuple[int, float]:
    completions = [completion async for completion in engine.generate(requests)]
    return sum(c.token_ids.size for c in completions), sum(float(c.log_probs.sum()) for c in completions)


def _cpu_s(process: psutil.Process) -> float:
    """Return CPU seconds of that process and this one together."""
    times = process.cpu_times()
    return time.process_time() + times.user + times.system
