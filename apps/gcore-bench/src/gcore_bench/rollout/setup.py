"""The models of a run, made once in a process of its own."""

from collections.abc import Sequence
from pathlib import Path

from gcore_bench.rollout.local import as_engine
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.workload import generation_shape, max_length, sync_max_length, sync_shape
from gcore_rollout import Engine, Request


class _Nothing:
    async def generate(self, requests: Sequence[Request]) -> tuple[int, float]:
        raise AssertionError(f"{len(requests)} requests for the process that makes models")


def make_models(folder: Path, options: RolloutOptions) -> Engine:
    """Write ``model`` and ``sync-model``; the engine is good for nothing."""
    # Here, as it imports transformers, which the command itself does not need.
    from gcore_bench.trainer.models import make_model

    if "generation" in options.parts:
        make_model(folder / "model", generation_shape(options), max_length=max_length(options), seed=options.seed)
    if "sync" in options.parts:
        make_model(folder / "sync-model", sync_shape(options), max_length=sync_max_length(), seed=options.seed)
    return as_engine(_Nothing(), folder / "nothing.json")
