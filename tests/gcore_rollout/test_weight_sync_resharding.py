"""Weights of a trainer that divides them reach an engine that does not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_oracles import TinyModel, collect
from rank_pool import RankServer, serving_ranks
from weight_sync_oracles import REQUESTS, TOLERANCE, as_samples, difference, training_samples

from gcore_rollout import HFEngine
from gcore_rollout.weight_sync.updates import FullWeights, WeightMirror, make_delta

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rank_server() -> Iterator[RankServer]:
    with serving_ranks(Path(__file__).with_name("weight_sync_megatron_cases.py")) as server:
        yield server


async def test_an_engine_follows_a_tensor_parallel_trainer(
    rank_server: RankServer, tied: TinyModel
) -> None:
    """Two ranks train; the first update is a full one and the second a delta."""
    ranks, layout = rank_server.shared(2), {"tensor_model_parallel_size": 2}
    engine = HFEngine.from_pretrained(tied.path)
    mirror = WeightMirror(engine)
    steps = [training_samples(seed=seed) for seed in (1, 2)]
    before = await collect(engine, *REQUESTS)
    for version in (1, 2):
        (weights, _), _ = ranks.run(
            "megatron_steps", str(tied.path), layout, steps[:version], [], size=2
        )
        await mirror.apply(
            FullWeights(version=1, tensors=weights.items())
            if version == 1
            else make_delta(dict(mirror), weights.items(), base_version=1, version=2)
        )
        after = await collect(engine, *REQUESTS)
        assert {v for c in after.values() for v in c.weight_versions.tolist()} == {version}
        scored = [*as_samples(before), *as_samples(after)]
        # The same steps again, for what is scored is known only now.
        for _, log_probs in ranks.run(
            "megatron_steps", str(tied.path), layout, steps[:version], scored, size=2
        ):
            assert difference(before, log_probs[: len(before)]) > 100 * TOLERANCE
            assert difference(after, log_probs[len(before) :]) < TOLERANCE
        before = after
