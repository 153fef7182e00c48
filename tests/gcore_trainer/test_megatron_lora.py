"""Adapters of `MegatronTrainer` are those of the torch backend: their start, their steps, their state, their merge."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_oracles import (
    CP,
    EP,
    GROUPS,
    GROUPS_OF_STATE,
    LOSS,
    OPTIMIZER,
    PP,
    SP,
    TP,
    VPP,
    assembled,
    data_parallel_size,
    largest_difference,
    save_megatron_model,
    uneven,
)
from rank_pool import RankServer
from trainer_oracles import load_padded, make_samples, nearest_merge_share, off_policy

from gcore_trainer import (
    LoRAConfig,
    OptimizerConfig,
    PackedModel,
    PolicyObjective,
    Sample,
    SFTObjective,
    TorchTrainer,
    ValueLossConfig,
    ValueObjective,
)

pytestmark = pytest.mark.slow

NUM_STEPS, SAVED = 3, 1
LORA = LoRAConfig(rank=4, alpha=8)
# With a smaller eps, an entry whose gradient is no more than rounding error moves by whole steps of the rate.
RATE = replace(OPTIMIZER, lr=3e-3, eps=1e-5)
OPTIONS: dict[str, Any] = {"optimizer": RATE, "objective": PolicyObjective(LOSS), "lora": LORA}
SAME = ("actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", "actor/lr")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@dataclass(frozen=True, kw_only=True)
class Alone:
    """Steps of the torch backend in one process, whose adapters are peft's."""

    samples: list[list[Sample]]
    metrics: list[dict[str, float]]
    states: list[dict[str, Any]]
    """After each step."""
    weights: Tensors
    """Merged, after the last."""


@cache
def alone(path: Path, lora: LoRAConfig = LORA) -> Alone:
    base = PackedModel.from_pretrained(path)
    samples = [off_policy(make_samples(GROUPS, seed=i), base, seed=i) for i in range(NUM_STEPS)]
    trainer = make_torch_trainer(path, lora)
    metrics: list[dict[str, float]] = []
    states: list[dict[str, Any]] = []
    for batch in samples:
        metrics.append(trainer.train_step([batch]))
        states.append(copied(trainer.state()))
    return Alone(
        samples=samples, metrics=metrics, states=states, weights=dict(trainer.export_weights())
    )


def make_torch_trainer(path: Path, lora: LoRAConfig = LORA) -> TorchTrainer:
    packed = PackedModel.from_pretrained(path, lora=lora)
    return TorchTrainer(packed, optimizer=RATE, objective=PolicyObjective(LOSS))


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return state | {
        group: {name: t.clone() for name, t in state[group].items()} for group in GROUPS_OF_STATE
    }


def replicas_of(
    samples: list[list[Sample]], size: int, layout: dict[str, Any], first: int = 0
) -> Any:
    replicas = data_parallel_size(size, layout)
    return [uneven(batch, replicas, seed=first + i) for i, batch in enumerate(samples)]


def assert_same_metrics(metrics: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(metrics) == len(expected)
    for name in SAME:
        own, others = [m[name] for m in metrics], [m[name] for m in expected]
        np.testing.assert_allclose(own, others, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("name", "size", "layout", "recompute"),
    [
        ("qwen2", 1, {}, True),
        ("qwen2", 2, {TP: 2}, False),
        ("qwen2", 2, {TP: 2, SP: True}, True),
        ("qwen2", 4, {PP: 2}, True),
        ("qwen3_tied", 4, {TP: 2, PP: 2, VPP: 2, SP: True}, False),
        ("qwen2", 2, {CP: 2}, False),
        ("qwen3_moe", 2, {EP: 2}, False),
    ],
    ids=str,
)
def test_steps_are_those_of_the_torch_backend(
    rank_server: RankServer,
    root: Path,
    name: str,
    size: int,
    layout: dict[str, Any],
    recompute: bool,
) -> None:
    """All-linear, as peft understands it: a mixture of experts has adapters in its attention alone."""
    path = save_megatron_model(name, root)
    expected = alone(path)
    steps = replicas_of(expected.samples, size, layout)
    options = OPTIONS | {"recompute": recompute}
    results = rank_server.shared(size).run(
        "megatron_trains", str(path), layout, options, steps, size=size
    )
    for metrics, _, _ in results:
        assert_same_metrics(metrics, expected.metrics)
    state = assembled(box for _, _, boxes in results for box in boxes)
    for group in GROUPS_OF_STATE:
        assert largest_difference(state[group], expected.states[-1][group]) < 1e-4, group
    assert largest_difference(results[0][1], expected.weights) < 1e-5
    assert any("mlp" in name for name in state["model"]) == (name != "qwen3_moe")


def test_adapters_move_between_the_backends(rank_server: RankServer, root: Path) -> None:
    path = save_megatron_model("qwen2", root)
    expected = alone(path)
    ranks, layout = rank_server.shared(), {TP: 2, PP: 2}
    first = replicas_of(expected.samples[:SAVED], 4, layout)
    results = ranks.run("megatron_trains", str(path), layout, OPTIONS, first, size=4)
    saved = assembled(box for _, _, boxes in results for box in boxes)
    counts = {"step": SAVED, "nonfinite_steps": 0, "optimizer_step": SAVED}

    trainer = make_torch_trainer(path)
    trainer.load_state(saved | counts)
    after, samples = expected.metrics[SAVED:], expected.samples[SAVED:]
    assert_same_metrics([trainer.train_step([batch]) for batch in samples], after)

    state = {group: expected.states[SAVED - 1][group] for group in GROUPS_OF_STATE}
    rest = replicas_of(samples, 4, layout, SAVED)
    metrics, weights = ranks.run(
        "megatron_resumes", str(path), layout, OPTIONS, counts, state, rest, size=4
    )[0]
    assert_same_metrics(metrics, after)
    assert largest_difference(weights, dict(trainer.export_weights())) < 1e-5


@pytest.mark.parametrize(
    ("names", "layout"),
    [
        (("q_proj", "v_proj"), {TP: 2}),
        # The first stage has nothing to learn.
        (("mlp.up_proj", "model.layers.3.self_attn.o_proj"), {TP: 2, SP: True}),
        (("layers.3.self_attn.k_proj",), {PP: 2}),
        (("layers.0.self_attn.k_proj",), {PP: 2}),
    ],
    ids=str,
)
def test_only_target_modules_learn(
    rank_server: RankServer, root: Path, names: tuple[str, ...], layout: dict[str, Any]
) -> None:
    path = save_megatron_model("qwen3_tied", root)
    lora = replace(LORA, target_modules=names)
    expected = alone(path, lora)
    options = OPTIONS | {"lora": lora, "recompute": True}
    steps = replicas_of(expected.samples, 2, layout)[:2]
    results = rank_server.shared(2).run(
        "megatron_trains", str(path), layout, options, steps, size=2
    )
    assert_same_metrics(results[0][0], expected.metrics[:2])
    state = assembled(box for _, _, boxes in results for box in boxes)
    assert largest_difference(state["model"], expected.states[1]["model"]) < 1e-4
    before, weights = dict(load_padded(path).named_parameters()), results[0][1]
    changed = {
        name.removesuffix(".weight")
        for name, w in weights.items()
        if not torch.equal(w, before[name])
    }
    assert changed == {name.partition(".lora_")[0] for name in state["model"]}
    assert all(
        any(layer.endswith(f".{name}") for name in names) or layer in names for layer in changed
    )


def test_before_the_first_step_it_is_the_model(rank_server: RankServer, root: Path) -> None:
    path = save_megatron_model("qwen3", root)
    samples = make_samples(GROUPS, seed=0)
    arguments = str(path), {TP: 2, SP: True}
    ranks = rank_server.shared(2)
    [with_adapters, weights], _ = ranks.run(
        "megatron_predicts", *arguments, {"lora": LORA}, [samples], size=2
    )
    [without, expected], _ = ranks.run("megatron_predicts", *arguments, {}, [samples], size=2)
    for own, other in zip(with_adapters[0], without[0], strict=True):
        np.testing.assert_array_equal(own, other)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], w) for name, w in expected.items())


def test_bfloat16_learns(rank_server: RankServer, root: Path) -> None:
    path = save_megatron_model("qwen3_tied", root)
    layout = {TP: 2}
    steps = replicas_of([make_samples(GROUPS[:1], seed=0)] * 8, 2, layout)
    options = {
        "optimizer": OptimizerConfig(lr=1e-2),
        "objective": SFTObjective(),
        "dtype": torch.bfloat16,
        "recompute": True,
        "lora": LORA,
    }
    results = rank_server.shared(2).run(
        "megatron_trains", str(path), layout, options, steps, size=2
    )
    metrics, weights, boxes = results[0]
    assert metrics[-1]["sft/loss"] < metrics[0]["sft/loss"] - 0.5
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert {tensor.dtype for *_, tensor in boxes} == {torch.float32}
    state = assembled(box for *_, boxes in results for box in boxes)["model"]
    adapters = {
        name: tensor.bfloat16() for name, tensor in state.items()
    }  # the model computes with the rounded ones
    base = {name: p.detach().bfloat16() for name, p in load_padded(path).named_parameters()}
    assert nearest_merge_share(weights, base, adapters, LORA.alpha / LORA.rank) > 0.999


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        (
            "qwen2",
            {"lora": LoRAConfig(target_modules=("q_proj", "lm_head"))},
            "expected all-linear alone or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj: "
            "no layer is named 'lm_head'",
        ),
        (
            "qwen3_moe",
            {"lora": LoRAConfig(target_modules=("up_proj",))},
            "expected all-linear alone or some of q_proj, k_proj, v_proj, o_proj: no layer is named 'up_proj'",
        ),
        (
            "qwen2",
            {"lora": LORA, "objective": ValueObjective(ValueLossConfig())},
            "expected None for objective ValueObjective, which reads values",
        ),
    ],
    ids=["head", "experts", "critic"],
)
def test_adapters_that_are_not_there_are_refused(
    rank_server: RankServer, root: Path, name: str, options: dict[str, Any], reason: str
) -> None:
    path = save_megatron_model(name, root)
    [error] = rank_server.shared(1).errors("megatron_trains", str(path), {}, options, [], size=1)
    assert error.startswith("ConfigError: ")
    assert reason in error
