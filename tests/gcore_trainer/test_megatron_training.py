"""Steps of `MegatronTrainer` are those of AdamW in one process, in every layout; bfloat16 learns too."""

from dataclasses import replace
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
    LOSS,
    OPTIMIZER,
    PP,
    SP,
    TP,
    VPP,
    Plain,
    data_parallel_size,
    largest_difference,
    save_megatron_model,
    train_plainly,
    uneven,
)
from rank_pool import RankServer
from trainer_oracles import make_samples
from transformers import AutoModelForCausalLM

from gcore_trainer import MegatronConfig, OptimizerConfig, PolicyObjective, SFTObjective

pytestmark = pytest.mark.slow

NUM_STEPS = 3
OPTIONS: dict[str, Any] = {"optimizer": OPTIMIZER, "objective": PolicyObjective(LOSS)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@cache
def plain(path: Path) -> Plain:
    return train_plainly(path, NUM_STEPS)


@pytest.mark.parametrize(
    ("name", "size", "layout", "recompute"),
    [
        ("qwen2", 4, {TP: 2, PP: 2}, True),
        ("qwen2", 4, {PP: 2}, False),
        ("qwen2", 4, {TP: 2, SP: True}, True),
        ("qwen3", 4, {TP: 2, PP: 2, VPP: 2, SP: True}, False),
        ("qwen3_moe", 4, {TP: 2, EP: 4, SP: True}, False),
        ("llama", 4, {CP: 2}, False),
        # Interleaved stages with replicas and tied embeddings.
        ("qwen3_tied", 4, {PP: 2, VPP: 2}, False),
        # More ranks than key-value heads.
        ("qwen3", 4, {TP: 4, SP: True}, True),
        ("qwen2", 4, {TP: 4}, False),
    ],
    ids=str,
)
def test_steps_are_those_of_plain_adamw(
    rank_server: RankServer,
    root: Path,
    name: str,
    size: int,
    layout: dict[str, Any],
    recompute: bool,
) -> None:
    """Clipping, weight decay and warm-up included; replicas have one and several micro-batches."""
    path = save_megatron_model(name, root)
    expected = plain(path)
    replicas = data_parallel_size(size, layout)
    steps = [uneven(samples, replicas, seed=i) for i, samples in enumerate(expected.samples)]
    options = OPTIONS | {"recompute": recompute}
    results = rank_server.shared(size).run(
        "megatron_trains", str(path), layout, options, steps, size=size
    )
    for metrics, _, _ in results:
        assert metrics == results[0][0]
        np.testing.assert_allclose(
            [m["actor/grad_norm"] for m in metrics], expected.grad_norms, rtol=1e-4
        )
        assert all(m["actor/grad_norm"] > OPTIMIZER.grad_clip for m in metrics)
        assert metrics[0]["actor/lr"] == pytest.approx(OPTIMIZER.lr / 3)
    assert largest_difference(results[0][1], expected.tensors[-1]["model"]) < 1e-4


@pytest.fixture(scope="module")
def without_settings() -> dict[str, Any]:
    """What `megatron_trains_and_scores` returned without settings, by model and layout."""
    return {}


OVERLAP: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True}
BUCKETS: dict[str, Any] = OVERLAP | {"bucket_size": 5_000}


@pytest.mark.parametrize(
    ("name", "layout", "settings"),
    [
        ("qwen3", {}, {"overlap_grad_reduce": True}),
        ("qwen3", {}, {"overlap_param_gather": True}),
        ("qwen3", {}, BUCKETS),
        ("qwen3_moe", {}, OVERLAP),
        ("qwen3_moe", {}, BUCKETS),
        ("qwen3_moe", {EP: 2}, BUCKETS | {"grouped_gemm": True, "bias_activation_fusion": True}),
        ("qwen2", {PP: 2}, OVERLAP),
        ("qwen3", {TP: 2}, {"recompute_granularity": "selective"}),
        ("qwen3_moe", {}, {"recompute_granularity": "selective"}),
        ("qwen3_moe", {EP: 2}, OVERLAP | {"recompute_granularity": "full"}),
        # What only CUDA has by itself: the products of linear layers add gradients up.
        ("qwen2", {PP: 2}, {"cuda_fusions": True}),
        ("qwen3", {TP: 2}, {"cuda_fusions": True, "recompute_granularity": "selective"}),
        ("qwen3_moe", {}, BUCKETS | {"cuda_fusions": True}),
    ],
    ids=str,
)
def test_settings_of_megatron_change_no_step(
    rank_server: RankServer,
    root: Path,
    without_settings: dict[str, Any],
    name: str,
    layout: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    """Each rank computes log-probs between updates, too: by parameters that were gathered in time.

    Of several buckets ranks have other parts, and add up squares in another order: norms, by which gradients are
    clipped, differ by 1e-7 from the first step on, and by more after some steps. So do gradients that products add up.
    """
    tolerance = 1e-6
    if "bucket_size" in settings or "cuda_fusions" in settings:
        tolerance = 1e-5
    path = save_megatron_model(name, root)
    replicas = data_parallel_size(2, layout)
    samples = plain(path).samples
    steps = [uneven(batch, replicas, seed=i) for i, batch in enumerate(samples)]

    def train(*, cuda_fusions: bool = False, **settings: Any) -> list[Any]:
        config = MegatronConfig(**settings)
        options = OPTIONS | {"megatron": config, "cuda_fusions": cuda_fusions}
        arguments = (str(path), layout, options, steps)
        return rank_server.shared(2).run("megatron_trains_and_scores", *arguments, size=2)

    case = f"{name} {layout}"
    if case not in without_settings:
        without_settings[case] = train()
    results = train(**settings)
    for (expected, expected_scores, weights), (actual, scores, actual_weights) in zip(
        without_settings[case], results, strict=True
    ):
        for one, other in zip(expected, actual, strict=True):
            assert other == pytest.approx(one, rel=tolerance, abs=tolerance)
        assert actual[0] == pytest.approx(expected[0], rel=1e-6, abs=1e-6)
        np.testing.assert_allclose(scores, expected_scores, rtol=tolerance, atol=tolerance)
        if weights:
            assert largest_difference(actual_weights, weights) < tolerance


def test_bfloat16_learns(rank_server: RankServer, root: Path) -> None:
    path = save_megatron_model("qwen3_tied", root)
    steps = [uneven(make_samples(GROUPS[:1], seed=0), 2, seed=0)] * 4
    options = {
        "optimizer": OptimizerConfig(lr=1e-2),
        "objective": SFTObjective(),
        "dtype": torch.bfloat16,
    }
    results = rank_server.shared().run(
        "megatron_trains", str(path), {TP: 2}, options, steps, size=4
    )
    metrics, weights, boxes = results[0]
    assert metrics[-1]["sft/loss"] < metrics[0]["sft/loss"] - 0.5
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert {tensor.dtype for *_, tensor in boxes} == {torch.float32}


def test_a_step_of_idle_samples_alone_has_no_gradient(rank_server: RankServer, root: Path) -> None:
    path = save_megatron_model("qwen3_tied", root)
    samples = [
        replace(s, advantages=np.zeros(s.response_ids.size, np.float32))
        for s in make_samples(GROUPS, seed=0)
    ]
    layout = {PP: 2, VPP: 2}
    [[metrics], _, _], *_ = rank_server.shared().run(
        "megatron_trains", str(path), layout, {}, [[[samples], []]], size=4
    )
    assert (
        metrics["actor/grad_norm"]
        == metrics["actor/pg_loss"]
        == metrics["perf/computed_tokens"]
        == 0
    )


def test_a_step_without_a_finite_gradient_is_skipped(rank_server: RankServer, root: Path) -> None:
    path = save_megatron_model("qwen3_tied", root)
    samples = [
        replace(s, advantages=np.full(s.response_ids.size, 3e38, np.float32))
        for s in make_samples(GROUPS, seed=0)
    ]
    layout = {TP: 2, PP: 2}
    results = rank_server.shared().run(
        "megatron_trains", str(path), layout, {}, [[[samples]]], size=4
    )
    [metrics], weights, _ = results[0]
    assert not np.isfinite(metrics["actor/grad_norm"])
    assert metrics["actor/nonfinite_steps"] == 1
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert all(torch.equal(weights[name], p) for name, p in model.named_parameters())
