"""Processes of engines, all forked from one server that has imported vLLM and transformers once."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from gcore_bench.harness.models import make_model
from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Figures
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.workload import SYNC_MAX_LENGTH, generation_shape, max_length, sync_shape
from gcore_rollout import PRELOAD_HF, PRELOAD_VLLM, AnySample, Engine, EngineProcess, EngineStats, Request

ENVIRONMENT = {
    # Settings of VLLMEngine, for bare vLLM too: one process, no telemetry, eager on a CPU.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_COMPILE_DISABLE": "1",
}
"""Environment of all processes."""
_QWEN2 = "transformers.models.qwen2.modeling_qwen2"

Generate = Callable[[Sequence[Request]], Awaitable[tuple[int, float]]]
"""Generates completions, and returns the number of their tokens and the sum of their log-probabilities."""


class Processes:
    """Starts processes with one engine each."""

    def __init__(self, *, threads: int, with_vllm: bool) -> None:
        self._threads = threads
        self._preload = (*PRELOAD_VLLM, "vllm.entrypoints.llm", _QWEN2) if with_vllm else (*PRELOAD_HF, _QWEN2)

    async def start(self, name: str, factory: Callable[[], Engine[Any, Any]]) -> EngineProcess[Any, Any]:
        """Start a process whose engine ``factory`` makes.

        Raises:
            BenchError: the engine could not be made.
        """
        try:
            return await EngineProcess.start(factory, num_threads=self._threads, preload=self._preload)
        except Exception as error:
            raise BenchError(f"{name} could not be started: {error}") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured(AnySample):
    """The figures of a `generate` whose completions stayed in their process."""

    figures: Figures


class _MeasuredEngine:
    """The part of an engine that `EngineProcess` needs; it yields figures in place of completions."""

    def __init__(self, generate: Generate | None) -> None:
        self._generate = generate

    def stats(self) -> EngineStats:
        return EngineStats(prompt_tokens=0, completion_tokens=0, num_running=0, num_waiting=0, weight_version=0)

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Measured]:
        assert self._generate is not None
        figures = await measured(self._generate, requests, time.process_time)
        yield Measured(request_id="", index=0, finish_reason="stop", figures=figures)

    async def close(self) -> None:
        """Do nothing, because the process ends next."""


def as_engine(generate: Generate | None) -> Engine[Any, Any]:
    """Return an engine for an `EngineProcess` that yields a `Measured`; the other methods are never called."""
    return cast(Engine[Any, Any], _MeasuredEngine(generate))


async def measured(generate: Generate, requests: Sequence[Request], cpu_time_s: Callable[[], float]) -> Figures:
    """Generate, and return the figures by the names that tables use."""
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


def make_models(folder: Path, options: RolloutOptions) -> Engine[Any, Any]:
    """Write ``model`` and ``sync-model`` to ``folder``, in an engine's process; the engine generates nothing."""
    if "generation" in options.parts:
        make_model(folder / "model", generation_shape(options), max_length=max_length(options), seed=options.seed)
    if "sync" in options.parts:
        make_model(folder / "sync-model", sync_shape(options), max_length=SYNC_MAX_LENGTH, seed=options.seed)
    return as_engine(None)
