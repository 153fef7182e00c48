"""Weights whose names and shapes are known before they come: all are checked first, and then taken one by one."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_oracles import TinyModel, collect, errors, make_request

from gcore_rollout import HFEngine
from gcore_rollout.engines.vllm import process
from gcore_rollout.weight_sync.layout import layout_of


class ComingWeights:
    """Copies of tensors, each made when it is asked for; it counts those that are in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.layout = layout_of(tensors)
        self.num_made = 0
        self.most_alive = 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        alive: weakref.WeakSet[Any] = weakref.WeakSet()
        for name, tensor in self._tensors.items():
            copy = tensor.clone()
            alive.add(copy.untyped_storage())
            self.num_made += 1
            self.most_alive = max(self.most_alive, len(alive))
            yield name, copy
            del copy


async def test_the_engine_takes_them_one_by_one(tied: TinyModel) -> None:
    engine = HFEngine.from_pretrained(tied.path)
    request = make_request("r", 9, n=2)
    weights = ComingWeights(tied.new.state_dict())
    await engine.update_weights(weights, version=1)
    assert weights.num_made == len(weights.layout) > 10
    assert weights.most_alive <= 2
    assert max(errors(tied.new, [request], await collect(engine, request))) < 1e-5
    state = tied.old.state_dict()
    name = "model.norm.weight"
    for wrong in ({**state, "other": torch.ones(1)}, {**state, name: torch.ones(3)}):
        weights = ComingWeights(wrong)
        with pytest.raises(ValueError, match=r"unknown names \['other'\]|'model.norm.weight' is"):
            await engine.update_weights(weights, version=2)
        assert not weights.num_made
    del state[name]
    with pytest.raises(ValueError, match=r"missing names \['model.norm.weight'\]"):
        await engine.update_weights(ComingWeights(state), version=2)
    assert engine.weight_version == 1
    assert max(errors(tied.new, [request], await collect(engine, request))) < 1e-5
    await engine.close()


def test_vllm_is_given_them_one_by_one(tied: TinyModel) -> None:
    shapes = process.checkpoint_shapes(tied.path)
    weights = ComingWeights(tied.new.state_dict())
    published = process.publish_weights(tied.path, shapes, weights, is_tied=True)
    assert not weights.num_made
    names = [name for name, _ in published]
    assert set(names) == set(weights.layout) - {"lm_head.weight"}
    assert weights.most_alive <= 2
    wrong = ComingWeights({**tied.new.state_dict(), "model.norm.weight": torch.ones(3)})
    with pytest.raises(ValueError, match=r"shape of weight 'model.norm.weight' is \(3,\)"):
        process.publish_weights(tied.path, shapes, wrong, is_tied=True)
    assert not wrong.num_made
