"""gcore's engines, in a process that generates for itself or for another."""

from collections.abc import Sequence
from pathlib import Path

from gcore_bench.rollout.local import as_engine
from gcore_rollout import Engine, Request


def make_engine(kind: str, model: Path, *, max_num_seqs: int) -> Engine:
    """Make an engine of kind ``hf`` or ``vllm``."""
    if kind == "hf":
        from gcore_rollout import HFEngine

        return HFEngine.from_pretrained(model, max_num_seqs=max_num_seqs, eos_token_ids=[])
    from gcore_rollout import VLLMEngine

    return VLLMEngine.from_pretrained(model, max_num_seqs=max_num_seqs, eos_token_ids=[])


async def collect(engine: Engine, requests: Sequence[Request]) -> tuple[int, float]:
    """Return the number of tokens, and the sum of their log-probabilities."""
    tokens, log_prob_sum = 0, 0.0
    async for completion in engine.generate(requests):
        tokens += completion.token_ids.size
        log_prob_sum += float(completion.log_probs.sum())
    return tokens, log_prob_sum


class _InProcess:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, requests: Sequence[Request]) -> tuple[int, float]:
        return await collect(self._engine, requests)


def make_local(kind: str, model: Path, output: Path, *, max_num_seqs: int) -> Engine:
    """Make an engine that generates for its own process."""
    return as_engine(_InProcess(make_engine(kind, model, max_num_seqs=max_num_seqs)), output)
