"""Generation that is measured in the process that generates."""

import json
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Protocol, cast

from gcore_bench.harness.report import Figures
from gcore_rollout import Completion, Engine, EngineStats, Request


class Generator(Protocol):
    """Generates completions and does not return them."""

    async def generate(self, requests: Sequence[Request]) -> tuple[int, float]:
        """Return the number of tokens, and the sum of their log-probabilities."""
        ...


class _Local:
    """The part of an engine that `EngineProcess` needs; it yields no completions, but writes its figures to a file."""

    def __init__(self, generator: Generator, output: Path) -> None:
        self._generator = generator
        self._output = output

    def stats(self) -> EngineStats:
        return EngineStats(prompt_tokens=0, completion_tokens=0, num_running=0, num_waiting=0, weight_version=0)

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion]:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        tokens, log_prob_sum = await self._generator.generate(requests)
        figures = generation_figures(time.perf_counter() - wall_s, time.process_time() - cpu_s, tokens, log_prob_sum)
        self._output.write_text(json.dumps(figures))
        nothing: tuple[Completion, ...] = ()
        for completion in nothing:
            yield completion

    async def close(self) -> None:
        """Do nothing, because the process ends next."""


def as_engine(generator: Generator, output: Path) -> Engine:
    """Wrap a generator for an `EngineProcess`; each `generate` writes its figures to ``output``."""
    # The other methods of an engine are never called.
    return cast(Engine, _Local(generator, output))


def generation_figures(wall_s: float, cpu_s: float, tokens: int, log_prob_sum: float) -> Figures:
    """Return the figures by the names that tables use."""
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "tokens": float(tokens),
        "tokens_per_s": tokens / wall_s,
        "log_prob": log_prob_sum / tokens,
    }
