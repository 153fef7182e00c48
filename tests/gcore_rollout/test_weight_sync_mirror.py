"""The mirror and its engine agree, whatever comes in which order, and whatever fails."""

import asyncio
from collections.abc import Iterable, Iterator
from typing import cast

import pytest
import torch
from engine_oracles import TinyModel
from weight_sync_oracles import LORA, adapters_of, check_behind, check_synced, make_trainer, train

from gcore_rollout import Engine, HFEngine, RolloutError
from gcore_rollout.weight_sync.updates import (
    A_OF,
    B_OF,
    AdapterWeights,
    FullWeights,
    WeightDelta,
    WeightMirror,
    WeightUpdate,
    make_delta,
)

State = dict[str, torch.Tensor]


class FakeEngine:
    """Holds what it was given; may fail before or after it takes it, or wait."""

    def __init__(self) -> None:
        self.weights: State = {}
        self.weight_version = 0
        self.updates: list[int] = []
        self.fails: str | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int
    ) -> None:
        self.updates.append(version)
        new = {name: tensor.clone() for name, tensor in weights}
        await self.gate.wait()
        if self.fails == "before":
            raise OSError("no")
        self.weights, self.weight_version = new, version
        if self.fails == "after":
            raise OSError("no answer")


def make_mirror(weights: State | None = None) -> tuple[FakeEngine, WeightMirror]:
    engine = FakeEngine()
    return engine, WeightMirror(cast(Engine, engine), None if weights is None else weights.items())


def versions_of_weights(count: int) -> list[State]:
    """Of two tensors: two elements of one change, other ones each time, and all of the other."""
    return [
        {"few.weight": (i + 1.0) * torch.eye(8)[i].diag(), "all.bias": torch.full((3,), i)}
        for i in range(count)
    ]


def delta(states: list[State], base: int, version: int) -> WeightDelta:
    return make_delta(states[base], states[version].items(), base_version=base, version=version)


def full(states: list[State], version: int) -> FullWeights:
    return FullWeights(version=version, tensors=states[version].items())


def adapters(version: int, base_version: int, value: float = 1.0) -> AdapterWeights:
    tensors = {"few" + A_OF: torch.full((1, 8), value), "few" + B_OF: torch.ones(8, 1)}
    return AdapterWeights(base_version=base_version, version=version, scaling=2.0, tensors=tensors)


def check_agree(engine: FakeEngine, mirror: WeightMirror, expected: State, version: int) -> None:
    assert engine.weight_version == mirror.version == version
    for weights in (engine.weights, dict(mirror)):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


async def test_all_forms_one_after_the_other() -> None:
    states = versions_of_weights(6)
    engine, mirror = make_mirror(states[0])
    await mirror.apply(delta(states, 0, 1))
    check_agree(engine, mirror, states[1], 1)
    for version in (2, 3):
        await mirror.apply(adapters(version, base_version=1, value=version))
        expected = states[1] | {"few.weight": states[1]["few.weight"] + 2.0 * version}
        check_agree(engine, mirror, expected, version)
    await mirror.apply(full(states, 4), delta(states, 4, 5), adapters(9, base_version=5))
    check_agree(engine, mirror, states[5] | {"few.weight": states[5]["few.weight"] + 2.0}, 9)
    assert engine.updates == [1, 2, 3, 9]
    await mirror.apply()
    assert engine.updates == [1, 2, 3, 9]


async def test_a_wrong_base_is_refused_and_a_full_update_helps() -> None:
    states = versions_of_weights(7)
    engine, mirror = make_mirror()
    assert mirror.version is None
    wrong: list[tuple[WeightUpdate, str]] = [
        (delta(states, 0, 1), "changes version 0, but nothing is here: send a full update"),
        (
            adapters(1, base_version=0),
            "belong to version 0, but nothing is here: send a full update",
        ),
    ]
    for update, message in wrong:
        with pytest.raises(RolloutError, match=message):
            await mirror.apply(update)
    await mirror.apply(full(states, 2))
    check_agree(engine, mirror, states[2], 2)
    wrong = [
        (delta(states, 3, 4), "changes version 3, but version 2 is here: send a full update"),
        (
            adapters(4, base_version=3),
            "belong to version 3, but version 2 is here: send a full update",
        ),
    ]
    for update, message in wrong:
        with pytest.raises(RolloutError, match=message):
            await mirror.apply(update)
    check_agree(engine, mirror, states[2], 2)
    await mirror.apply(adapters(4, base_version=2))
    with pytest.raises(RolloutError, match="changes version 4, but adapters of version 4 are here"):
        await mirror.apply(delta(states, 4, 5))
    await mirror.apply(full(states, 6))
    check_agree(engine, mirror, states[6], 6)


async def test_versions_go_up() -> None:
    states = versions_of_weights(3)
    engine, mirror = make_mirror(states[0])
    with pytest.raises(ValueError, match="version is 1; expected a version above the current 2"):
        await mirror.apply(full(states, 2), full(states, 1))
    assert (mirror.version, engine.updates) == (0, [])
    with pytest.raises(ValueError, match="version is 0; expected a version above the current 0"):
        await mirror.apply(full(states, 0))


@pytest.mark.parametrize("fails", ["before", "after"])
async def test_an_update_that_fails_leaves_both_agreeing(fails: str) -> None:
    states = versions_of_weights(5)
    for first, *rest in (
        [delta(states, 1, 2)],
        [full(states, 2)],
        [adapters(2, base_version=1)],
        [delta(states, 1, 2), delta(states, 2, 3)],
        [delta(states, 1, 2), full(states, 3), delta(states, 3, 4)],
    ):
        engine, mirror = make_mirror(states[0])
        await mirror.apply(full(states, 1))
        engine.fails = fails
        with pytest.raises(OSError, match="no"):
            await mirror.apply(first, *rest)
        check_agree(
            engine, mirror, dict(engine.weights), 1 if fails == "before" else engine.updates[-1]
        )
        engine.fails = None
        if fails == "before":
            check_agree(engine, mirror, states[1], 1)
            await mirror.apply(first, *rest)
            assert mirror.version == engine.updates[-1]


async def test_an_engine_that_refuses_the_version_keeps_what_it_has() -> None:
    """The mirror knows of no version yet; the engine refuses the one that it has."""
    states = versions_of_weights(1)
    engine, mirror = make_mirror()
    engine.fails = "before"
    with pytest.raises(OSError, match="no"):
        await mirror.apply(full(states, 0))
    assert mirror.version is None
    assert not dict(mirror)


async def test_an_update_that_does_not_fit_changes_nothing() -> None:
    states = versions_of_weights(3)
    engine, mirror = make_mirror(states[0])

    def torn() -> Iterator[tuple[str, torch.Tensor]]:
        yield "few.weight", torch.zeros(8, 8)
        raise OSError("the sender is gone")

    with pytest.raises(OSError, match="the sender is gone"):
        await mirror.apply(delta(states, 0, 1), FullWeights(version=2, tensors=torn()))
    other = make_delta({"x": torch.zeros(1)}, [("x", torch.ones(1))], base_version=1, version=2)
    with pytest.raises(ValueError, match="unknown names"):
        await mirror.apply(delta(states, 0, 1), other)
    bad = AdapterWeights(
        base_version=0, version=1, scaling=1.0, tensors={"few" + A_OF: torch.ones(1, 8)}
    )
    with pytest.raises(ValueError, match="has no B"):
        await mirror.apply(bad)
    assert (mirror.version, engine.updates) == (0, [])
    assert all(torch.equal(tensor, states[0][name]) for name, tensor in mirror)


async def test_a_cancelled_update_is_brought_to_its_end() -> None:
    states = versions_of_weights(3)
    engine, mirror = make_mirror(states[0])
    engine.gate.clear()
    update = asyncio.create_task(mirror.apply(delta(states, 0, 1)))
    await asyncio.sleep(0.01)
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    following = asyncio.create_task(mirror.apply(delta(states, 1, 2)))
    await asyncio.sleep(0.01)
    assert not following.done()
    engine.gate.set()
    await following
    check_agree(engine, mirror, states[2], 2)


async def test_what_was_given_may_change_afterwards() -> None:
    states = versions_of_weights(3)
    given = {name: tensor.clone() for name, tensor in states[1].items()}
    engine, mirror = make_mirror(given)
    update = adapters(1, base_version=0)
    await mirror.apply(update)
    for tensor in (*given.values(), *update.tensors.values()):
        tensor.fill_(7)
    check_agree(engine, mirror, states[1] | {"few.weight": states[1]["few.weight"] + 2.0}, 1)


def test_deltas_of_the_tests_are_sparse_and_dense() -> None:
    change = delta(versions_of_weights(2), 0, 1)
    assert (list(change.sparse), list(change.dense)) == (["few.weight"], ["all.bias"])


async def test_an_engine_follows_a_trainer_in_full(untied: TinyModel) -> None:
    engine, trainer = HFEngine.from_pretrained(untied.path), make_trainer(untied.path)
    mirror = WeightMirror(engine)
    for version in (3, 5):
        train(trainer, seed=version)
        await check_behind(engine, trainer)
        await mirror.apply(FullWeights(version=version, tensors=trainer.export_weights()))
        await check_synced(engine, trainer, version=version)


async def test_an_engine_that_has_lost_track_is_sent_all(tied: TinyModel) -> None:
    """What a sender does: what is new, and everything if that does not fit."""
    engine, trainer = HFEngine.from_pretrained(tied.path), make_trainer(tied.path, lora=LORA)
    mirror, base = WeightMirror(engine), {name: t.clone() for name, t in trainer.export_weights()}
    for version in (1, 2):
        train(trainer, seed=version)
        update = AdapterWeights(
            base_version=0,
            version=version,
            scaling=LORA.alpha / LORA.rank,
            tensors=adapters_of(trainer),
        )
        with pytest.raises(RolloutError):
            await mirror.apply(update)
        await mirror.apply(FullWeights(version=version, tensors=trainer.export_weights()))
        await check_synced(engine, trainer, version=version)
    change = make_delta(dict(trainer.export_weights()), base.items(), base_version=2, version=3)
    await mirror.apply(change)
    assert all(torch.equal(tensor, base[name]) for name, tensor in mirror)
