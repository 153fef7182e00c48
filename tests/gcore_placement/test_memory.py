"""Bytes of a device against the papers' sums, worked out by hand, and against what autograd keeps."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from planning_jobs import QWEN_7B, make_cluster, make_job
from transformers import Qwen2Config, Qwen2ForCausalLM

from gcore_placement import Efficiency, ModelShape, TrainingLayout
from gcore_placement.planning import memory
from gcore_placement.planning.layouts import Backend, TrainingLayouts
from gcore_placement.planning.options import EngineRoofline

GB = 1e9


def layout(
    backend: Backend, *, tp: int = 1, pp: int = 1, cp: int = 1, dp: int = 1, **changed: Any
) -> TrainingLayout:
    options: dict[str, Any] = {
        "gradient_checkpointing": False,
        "ppo_max_token_len": 16384,
        **changed,
    }
    return TrainingLayout(
        backend=backend,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        data_parallel_size=dp,
        **options,
    )


def parts_of(
    job: Any, *layouts: TrainingLayout, **options: Any
) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    return dict(memory.training_memory(job, TrainingLayouts(*layouts), **options))


def test_zero_stages_by_their_papers_sums() -> None:
    """ZeRO (arXiv 1910.02054, section 3.1) has 16 bytes a parameter, gradients in half precision; here 4 bytes each.

    So it is 18 bytes in bfloat16, of which ZeRO-1 divides 12, and 16 in float32, where weights are their own masters.
    """
    job = make_job()
    parameters = job.policy.num_parameters
    parts = parts_of(
        job, layout("torch", dp=8), layout("megatron", dp=8), layout("torch"), layout("megatron")
    )
    state = memory.resident_state(parts)
    assert_allclose(state, parameters * np.array([18 / 8, 6 + 12 / 8, 18, 18]), rtol=1e-6)
    wide = parts_of(
        replace(job, compute_bytes=4),
        layout("torch", dp=8),
        layout("megatron", dp=8),
        layout("torch"),
    )
    assert_allclose(
        memory.resident_state(wide), parameters * np.array([16 / 8, 8 + 8 / 8, 16]), rtol=1e-6
    )


def test_tensor_and_pipeline_ranks_divide_the_model() -> None:
    job = make_job()
    shape = job.policy
    table = shape.workload.vocab_size * shape.workload.hidden_size
    layers = shape.num_parameters - 2 * table
    (state,) = memory.resident_state(parts_of(job, layout("megatron", tp=4, pp=2, dp=1)))
    assert_allclose(state, 18 * (layers / 2 + table) / 4, rtol=1e-4)


def test_activations_by_hand() -> None:
    """Of micro-batches over CP 2 and TP 4 on the first of PP 2 stages, which has started two of them."""
    job = make_job(train_batch_size=512)
    tokens = job.training_tokens / 2 / np.ceil(job.training_tokens / 2 / 16384)
    assert 16000 < tokens < 16384
    h, i, kv = 3584, 18944, 512
    per_token = 2 * (4 * h + 2 * h + 2 * kv + 4 * i)
    kept, recomputed = parts_of(
        job,
        layout("megatron", tp=4, pp=2, cp=2, dp=2),
        layout("megatron", tp=4, pp=2, cp=2, dp=2, gradient_checkpointing=True),
    )["activations"]
    assert_allclose(kept, tokens / 2 / 4 * 28 * per_token)
    assert_allclose(recomputed, tokens / 2 / 4 * 28 * 2 * h)


def test_selective_recomputation_keeps_all_but_the_insides_of_mlps() -> None:
    """Of 28 layers of a dense model; an MLP at a time is computed again, when the logits are gone."""
    job = make_job({**QWEN_7B, "vocab_size": 64})
    sizes = layout("megatron", tp=2)
    tokens = job.training_tokens / np.ceil(job.training_tokens / 16384)
    parts = parts_of(job, sizes, state=memory.TrainingState(recomputes_mlps=True))
    h, i, kv = 3584, 18944, 512
    assert_allclose(parts["activations"], tokens / 2 * 28 * 2 * (6 * h + 2 * kv))
    assert_allclose(parts["recomputed layer"] + parts["logits"], tokens / 2 * 2 * 4 * i)
    [whole] = parts_of(job, sizes)["activations"]
    assert_allclose(parts["activations"] / whole, 1 - 4 * i / (6 * h + 2 * kv + 4 * i))


def test_micro_batches_of_small_updates_are_small() -> None:
    """A rank that has less than a micro-batch in an update holds the activations of what it has."""
    job = make_job(train_batch_size=512, ppo_mini_batch_size=2)
    tokens = job.training_tokens / 256 / 2
    assert job.longest_sequence < tokens < 32768
    full = job.training_tokens / 2 / np.ceil(job.training_tokens / 2 / 32768)
    whole, update = (
        parts_of(each, layout("megatron", dp=2, ppo_max_token_len=32768))["activations"][0]
        for each in (replace(job, ppo_mini_batch_size=0), job)
    )
    assert update / whole == pytest.approx(tokens / full)


def test_a_recomputed_layer_takes_the_place_of_the_logits() -> None:
    """Logits are gone when the last layer is computed again: the larger of the two counts."""
    for vocab_size, is_larger in ((608_256, False), (64, True)):
        job = make_job({**QWEN_7B, "vocab_size": vocab_size})
        parts = parts_of(job, *(layout("torch", gradient_checkpointing=r) for r in (True, False)))
        tokens = job.training_tokens / np.ceil(job.training_tokens / 16384)
        layer_bytes = 2 * tokens * job.policy.activations_per_token
        recomputed, kept = parts["recomputed layer"] + parts["logits"]
        assert_allclose(recomputed, max(layer_bytes, kept))
        assert (recomputed > kept) == is_larger


def test_what_else_is_held() -> None:
    alone = make_job()
    with_all = replace(alone, reference=True, critic=alone.policy)
    one, all_ = (parts_of(job, layout("torch", dp=8)) for job in (alone, with_all))
    assert_allclose(all_["reference"], 2 * alone.policy.num_parameters / 8, rtol=1e-6)
    for name in ("weights", "gradients", "optimizer"):
        assert_allclose(all_[name], 2 * one[name])
    assert_allclose(all_["activations"], one["activations"])
    chunk_bytes, head_bytes = (2 * 4 + 2) * (1 << 28), 4 * 152064 * 3584
    assert_allclose(one["logits"], chunk_bytes)
    assert_allclose(
        parts_of(alone, layout("torch"), layout("megatron", dp=8))["logits"],
        chunk_bytes + head_bytes,
    )
    assert_allclose(memory.total(one), sum(one.values()))


def test_engines_by_hand() -> None:
    shape = ModelShape.from_config(QWEN_7B)
    one, two, four, eight = (
        EngineRoofline(
            model=shape, cluster=make_cluster(8), tp=tp, compute_bytes=2, efficiency=Efficiency()
        )
        for tp in (1, 2, 4, 8)
    )
    assert_allclose(two.weights_bytes, shape.num_parameters)
    # 4 key-value heads: eight devices hold each of them twice.
    assert one.kv_token_bytes == 2 * 2 * 28 * 512
    assert eight.kv_token_bytes == four.kv_token_bytes


def kept_bytes(model: Any, num_tokens: int) -> int:
    """Bytes that a forward pass keeps for its backward pass, each storage once, in addition to the parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(
            inputs_embeds=torch.randn(1, num_tokens, model.config.hidden_size, requires_grad=True),
            use_cache=False,
        )
    return sum(storage.nbytes() for storage in kept.values())


def test_activations_are_what_autograd_keeps() -> None:
    """A layer more of Qwen2 in float32: within 20 percent of the formula, which counts fused norms and rotations."""
    options: dict[str, Any] = {
        "hidden_size": 96,
        "intermediate_size": 288,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    }
    num_tokens = 512
    kept: list[int] = []
    for num_layers in (2, 4):
        model = Qwen2ForCausalLM(
            Qwen2Config(**options, num_hidden_layers=num_layers, vocab_size=64)
        )
        kept.append(kept_bytes(model.model, num_tokens))
    config: dict[str, Any] = {
        "model_type": "qwen2",
        **options,
        "num_hidden_layers": 2,
        "vocab_size": 64,
    }
    predicted = 4 * num_tokens * ModelShape.from_config(config).activations_per_token
    assert (kept[1] - kept[0]) / 2 == pytest.approx(predicted, rel=0.2)
