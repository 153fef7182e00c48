"""Processes of engines, all forked from one server that has imported vLLM and transformers once."""

import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Protocol, cast

from gcore_bench.harness.models import make_model
from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Figures
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.workload import SYNC_MAX_LENGTH, generation_shape, max_length, sync_shape
from gcore_rollout import PRELOAD_HF, PRELOAD_VLLM, Completion, Engine, EngineProcess, EngineStats, Request

ENVIRONMENT = {
    # Settings of VLLMEngine, for bare vLLM too: one process, no telemetry, eager on a CPU.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_COMPILE_DISABLE": "1",
}
"""Environment of all processes."""
_QWEN2 = "transformers.models.qwen2.modeling_qwen2"


class Processes:
    """Starts processes with one engine each."""

    def __init__(self, *, threads: int, with_vllm: bool) -> None:
        self._threads = threads
        self._preload = (*PRELOAD_VLLM, "vllm.entrypoints.llm", _QWEN2) if with_vllm else (*PRELOAD_HF, _QWEN2)

    async def start(self, name: str, factory: Callable[[], Engine]) -> EngineProcess:
        """Start a process whose engine ``factory`` makes.

        Raises:
            BenchError: the engine could not be made.
        """
        try:
            return await EngineProcess.start(factory, num_threads=self._threads, preload=self._preload)
        except Exception as error:
            raise BenchError(f"{name} could not be started: {error}") from error


class Generator(Protocol):
    """Generates completions and does not return them."""

    async def generate(self, requests: Sequence[Request]) -> tuple[int, float]:
        """Return the number of tokens, and the sum of their log-probabilities."""
        ...


class _Measured:
    """The part of an engine that `EngineProcess` needs; it yields no completions, but writes its figures to a file."""

    def __init__(self, generator: Generator | None, output: Path) -> None:
        self._generator = generator
        self._output = output

    def stats(self) -> EngineStats:
        return EngineStats(prompt_tokens=0, completion_tokens=0, num_running=0, num_waiting=0, weight_version=0)

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion]:
        assert self._generator is not None
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        tokens, log_prob_sum = await self._generator.generate(requests)
        figures = generation_figures(time.perf_counter() - wall_s, time.process_time() - cpu_s, tokens, log_prob_sum)
        self._output.write_text(json.dumps(figures))
        nothing: tuple[Completion, ...] = ()
        for completion in nothing:
            yield completion

    async def close(self) -> None:
        """Do nothing, because the process ends next."""


def as_engine(generator: Generator | None, output: Path) -> Engine:
    """Wrap a generator for an `EngineProcess`; each `generate` writes its figures to ``output``."""
    # The other methods of an engine are never called.
    return cast(Engine, _Measured(generator, output))


def generation_figures(wall_s: float, cpu_s: float, tokens: int, log_prob_sum: float) -> Figures:
    """Return the figures by the names that tables use."""
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "tokens": float(tokens),
        "tokens_per_s": tokens / wall_s,
        "log_prob": log_prob_sum / tokens,
    }


def make_models(folder: Path, options: RolloutOptions) -> Engine:
    """Write ``model`` and ``sync-model`` to ``folder``, in an engine's process; the engine generates nothing."""
    if "generation" in options.parts:
        make_model(folder / "model", generation_shape(options), max_length=max_length(options), seed=options.seed)
    if "sync" in options.parts:
        make_model(folder / "sync-model", sync_shape(options), max_length=SYNC_MAX_LENGTH, seed=options.seed)
    return as_engine(None, folder / "nothing.json")
