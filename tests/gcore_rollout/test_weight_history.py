"""Weights that ranks send as changes: engines have exactly the sent weights, also one that starts late."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, cast

import pytest
import ray
import torch
from ray_cluster import ray_cluster

from gcore_rollout import (
    DeltaSender,
    DigestedWeights,
    Engine,
    EngineStats,
    InstrumentedEngine,
    UnmergedWeights,
    WeightRecord,
    WrongWeightsError,
    divide_weights,
)
from gcore_rollout.weight_sync.digests import HeldWeights, digest_held_tensor
from gcore_rollout.weight_sync.history import WeightHistory
from gcore_rollout.weight_sync.updates import A_OF, B_OF, AdapterWeights, FullWeights, WeightMirror
from gcore_trainer import LoRAConfig, merge_lora

pytestmark = pytest.mark.slow

NUM_RANKS = 3
State = dict[str, torch.Tensor]


class Sink:
    """What an update needs of an engine: it copies what it is given."""

    def __init__(self) -> None:
        self.weight_version, self.own, self.mirror = (
            0,
            State(),
            WeightMirror(cast(Engine[Any, Any], self)),
        )

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int
    ) -> None:
        self.own, self.weight_version = {name: tensor.clone() for name, tensor in weights}, version


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster("here"):
        yield


def changed(state: State, share: float, generator: torch.Generator) -> State:
    return {
        n: torch.where(torch.rand(t.shape, generator=generator) < share, t + 1, t)
        for n, t in state.items()
    }


def put(
    senders: list[DeltaSender], state: State, before: WeightHistory | None, version: int
) -> WeightHistory:
    """What the ranks send together, and how a controller adds it to what was sent before."""
    parts: list[WeightHistory] = []
    for rank, sender in enumerate(senders):
        own = divide_weights(state.items(), rank=rank, num_ranks=len(senders))
        weights = DigestedWeights(own, dtypes=[torch.bfloat16])
        parts.append(sender.put(weights, version=version, base_version=before and before.next_base))
    return parts[0].join(parts).after(before)


def same(found: State, expected: State) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


@pytest.mark.usefixtures("cluster")
async def test_engines_follow_changes_exactly() -> None:
    """One from the first update on, one from the fourth; after a while all weights are sent again."""
    generator = torch.Generator().manual_seed(0)
    state = {
        f"layers.{i}.weight": torch.randn(40, 30 + i, generator=generator).bfloat16()
        for i in range(7)
    }
    state["norm.weight"] = torch.randn(3, generator=generator).bfloat16()
    full_bytes = sum(tensor.nbytes for tensor in state.values())
    senders, history = [DeltaSender() for _ in range(NUM_RANKS)], None
    early, late = Sink(), Sink()
    lengths: list[int] = []
    for version in range(1, 24):
        state = changed(state, 0.9 if version == 3 else 0.002, generator)
        expected = DigestedWeights(state.items(), dtypes=[torch.bfloat16])
        assert dict(expected)
        history = put(senders, state, history, version)
        assert history.version == version
        assert history.digests == expected.digests
        lengths.append(len(history.updates))
        if lengths[-1] == 1:
            assert history.sent_bytes == full_bytes
        elif version != 3:
            assert history.sent_bytes < 0.05 * full_bytes
        for engine in (early, late) if version >= 4 else (early,):
            await history.apply_to(engine.mirror)
            assert engine.weight_version == version
            assert same(engine.own, state)
    assert lengths[:4] == [1, 2, 3, 1], "all weights again after changes of many bytes"
    assert lengths[4:21] == [*range(2, 18), 1], "and after many changes"


@pytest.mark.usefixtures("cluster")
async def test_of_weights_with_adapters_these_alone_are_sent() -> None:
    """After the frozen weights; an engine merges them as a trainer does, exactly, and one that starts late, too."""
    frozen = {f"layers.{i}.weight": torch.randn(96, 64).bfloat16() for i in range(5)} | {
        "norm.weight": torch.randn(64)
    }
    senders, history = [DeltaSender() for _ in range(NUM_RANKS)], None
    early, late, other_ranks = Sink(), Sink(), [DeltaSender() for _ in range(NUM_RANKS)]
    for version in range(1, 6):
        adapters = {f"layers.{i}{A_OF}": torch.randn(2, 64) for i in (0, 3)}
        adapters |= {f"layers.{i}{B_OF}": torch.randn(96, 2) for i in (0, 3)}
        if version == 5:
            senders = other_ranks
        parts: list[WeightHistory] = []
        for rank, sender in enumerate(senders):
            divided = partial(divide_weights, rank=rank, num_ranks=NUM_RANKS)
            unmerged = UnmergedWeights(
                frozen=partial(divided, frozen.items()),
                adapters=partial(divided, adapters.items()),
                scaling=0.5,
            )
            base_version = history and history.next_base
            parts.append(
                sender.put(
                    DigestedWeights([], unmerged=unmerged),
                    version=version,
                    base_version=base_version,
                )
            )
        history = parts[0].join(parts).after(history)
        sizes = [sum(tensor.nbytes for tensor in own.values()) for own in (adapters, frozen)]
        assert history.sent_bytes == (sum(sizes) if version in (1, 5) else sizes[0])
        assert len(history.updates) == (1 if version in (1, 5) else 2)
        expected = dict(merge_lora(frozen.items(), adapters, LoRAConfig(rank=2, alpha=1)))
        for engine in (early, late) if version >= 3 else (early,):
            await history.apply_to(engine.mirror)
            assert engine.weight_version == version
            assert same(engine.own, expected)


class WrongSink(Sink):
    """It computes with other weights than it was given."""

    def stats(self) -> EngineStats:
        return EngineStats(
            prompt_tokens=0,
            completion_tokens=0,
            num_running=0,
            num_waiting=0,
            weight_version=self.weight_version,
        )

    async def held_weights(self, names: object) -> HeldWeights:
        del names
        return HeldWeights(
            version=self.weight_version,
            tensors=[digest_held_tensor(n, (t + 1).clone) for n, t in self.own.items()],
        )


async def test_merged_weights_are_compared_where_they_are_merged() -> None:
    """They have no digests of the sender's."""
    engine = WrongSink()
    mirror = WeightMirror(
        InstrumentedEngine(cast(Any, engine), name="the engine", record=WeightRecord())
    )
    tensors = {f"layer{A_OF}": torch.ones(1, 4), f"layer{B_OF}": torch.ones(3, 1)}
    adapters = AdapterWeights(base_version=1, version=1, scaling=1.0, tensors=tensors)
    update = FullWeights(
        version=1, tensors={"layer.weight": torch.ones(3, 4)}.items(), adapters=adapters
    )
    with pytest.raises(
        WrongWeightsError, match=r"the engine does not have the trainer's weights of version 1"
    ):
        await mirror.apply(update)


@pytest.mark.usefixtures("cluster")
async def test_ranks_that_start_again_send_all_weights() -> None:
    state = {f"w{i}": torch.randn(20, 20).bfloat16() for i in range(4)}
    history = put([DeltaSender() for _ in range(2)], state, None, 1)
    engine = Sink()
    await history.apply_to(engine.mirror)
    state = {name: tensor + 1 for name, tensor in state.items()}
    history = put([DeltaSender() for _ in range(2)], state, history, 2)
    assert len(history.updates) == 1
    await history.apply_to(engine.mirror)
    assert same(engine.own, state)
    with pytest.raises(TypeError, match="a WeightHistory can only be given to a RayEngine"):
        iter(history)
    assert ray.is_initialized()
