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
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.processes import Processes, as_engine, generation_figures
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
    max_num_seqs = options.prompts * options.n
    async with AsyncExitStack() as stack:
        engines: dict[str, EngineProcess] = {}
        for name in dict.fromkeys(options.contenders):
            factory = partial(_make, name, folder / "model", _output(folder, name), max_num_seqs)
            engines[name] = await processes.start(name, factory)
            stack.push_async_callback(engines[name].close)
            await _measured(name, engines[name], warmup_requests(options), folder)
        for turn in rounds.turns(engines):
            row = await _measured(turn.contender, engines[turn.contender], requests, folder)
            if row["tokens"] != expected:
                raise BenchError(f"{turn.contender} made {row['tokens']:.0f} tokens; the samples have {expected}")
            turn.done({turn.contender: row}, f"{row['tokens_per_s']:,.0f} tokens/s")
    return rounds.runs


def _make(name: str, model: Path, output: Path, max_num_seqs: int) -> Engine:
    """Make a contender in its process, which alone imports its library."""
    if name == "vllm":
        from gcore_bench.rollout.contenders.vllm import VLLM

        return as_engine(VLLM(model, max_num_seqs=max_num_seqs), output)
    if name == "transformers":
        from gcore_bench.rollout.contenders.transformers import Transformers

        return as_engine(Transformers(model), output)
    if "hf" in name:
        from gcore_rollout import HFEngine as Kind
    else:
        from gcore_rollout import VLLMEngine as Kind

    engine = Kind.from_pretrained(model, max_num_seqs=max_num_seqs, eos_token_ids=[])
    return engine if name.endswith("-process") else as_engine(_InProcess(engine), output)


class _InProcess:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, requests: Sequence[Request]) -> tuple[int, float]:
        return await _collect(self._engine, requests)


async def _collect(engine: Engine, requests: Sequence[Request]) -> tuple[int, float]:
    """Return the number of tokens, and the sum of their log-probabilities."""
    tokens, log_prob_sum = 0, 0.0
    async for completion in engine.generate(requests):
        tokens += completion.token_ids.size
        log_prob_sum += float(completion.log_probs.sum())
    return tokens, log_prob_sum


def _output(folder: Path, name: str) -> Path:
    return folder / f"figures-{name}.json"


async def _measured(name: str, engine: EngineProcess, requests: Sequence[Request], folder: Path) -> Figures:
    """Return the figures of one turn, taken in the engine's process or, for ``-process``, over both processes."""
    try:
        if name.endswith("-process"):
            wall_s, cpu_s = time.perf_counter(), _cpu_s(engine.pid)
            tokens, log_prob_sum = await _collect(engine, requests)
            wall_s, cpu_s = time.perf_counter() - wall_s, _cpu_s(engine.pid) - cpu_s
            return generation_figures(wall_s, cpu_s, tokens, log_prob_sum)
        _output(folder, name).unlink(missing_ok=True)
        await _collect(engine, requests)
    except Exception as error:
        raise BenchError(f"{name} failed: {error}") from error
    return json.loads(_output(folder, name).read_text())


def _cpu_s(pid: int) -> float:
    """Return CPU seconds of that process and this one together."""
    times = psutil.Process(pid).cpu_times()
    return time.process_time() + times.user + times.system
