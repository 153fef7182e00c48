"""Which models and layouts the Megatron backend accepts, and where in a model the pieces of its parameters are."""

import runpy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from megatron_oracles import CONFIGS, EP, LLAMA3_ROPE, MOE, PP, SP, TP, VPP, save_megatron_model
from rank_pool import RankPool
from safetensors.torch import load_file, save_file
from trainer_oracles import SIZES
from transformers import GPT2Config, LlamaConfig, Qwen2Config, Qwen3MoeConfig

import gcore_trainer.megatron
from gcore_trainer import (
    ConfigError,
    LoRAConfig,
    ParallelConfig,
    TrainerError,
    UnsupportedModelError,
)
from gcore_trainer.megatron.adapters import check_targets, target_layers
from gcore_trainer.megatron.architecture import Architecture
from gcore_trainer.megatron.cpu import megatron_runtime
from gcore_trainer.megatron.pieces import TensorPiece

QUANTIZED: dict[str, Any] = {**SIZES, "quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    ("name", "layout", "message"),
    [
        (
            "llama",
            {TP: 8},
            "tensor_model_parallel_size=8 does not divide 4 attention heads; expected one of [1, 2, 4]",
        ),
        (
            "qwen3",
            {PP: 8},
            "pipeline_model_parallel_size=8 does not divide 4 layers; expected one of [1, 2, 4]",
        ),
        (
            "qwen3",
            {PP: 4, VPP: 2},
            "pipeline_model_parallel_size=4 x virtual_pipeline_model_parallel_size=2 does not divide 4 layers",
        ),
        (
            "llama",
            {EP: 2},
            "expert_model_parallel_size is 2; expected 1 for a model without experts",
        ),
        (
            "llama",
            {TP: 3},
            "tensor_model_parallel_size=3 is 3; expected a divisor of the world of 8 ranks: 6 ranks would fit",
        ),
        (
            "qwen3_moe",
            {EP: 8},
            "expert_model_parallel_size=8 does not divide 4 experts; expected one of [1, 2, 4]",
        ),
        (
            "qwen3_moe_deep",
            {EP: 4, PP: 4},
            "expert_model_parallel_size=4 does not divide 2 ranks of a pipeline stage",
        ),
        (
            "qwen3_moe",
            {EP: 2, TP: 2},
            "sequence_parallel is false with tensor_model_parallel_size=2 and 4 experts",
        ),
        (
            "qwen3_moe",
            {TP: 2, SP: True},
            "expert_model_parallel_size is 1 with tensor_model_parallel_size=2; expected more",
        ),
    ],
    ids=str,
)
def test_a_layout_that_does_not_divide_says_what_would(
    name: str, layout: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        Architecture(CONFIGS[name]).check_layout(ParallelConfig(**layout), world_size=8)
    assert message in str(error.value)


def test_key_value_heads_are_divided_or_shared() -> None:
    """Six key-value heads of twelve attention heads."""
    heads: dict[str, Any] = {"num_attention_heads": 12, "num_key_value_heads": 6}
    sizes: dict[str, Any] = SIZES | heads | {"hidden_size": 96, "intermediate_size": 96}
    config = LlamaConfig(**sizes)
    architecture = Architecture(config)
    for size in (1, 2, 3, 6, 12):
        architecture.check_layout(ParallelConfig(tensor_model_parallel_size=size), world_size=12)
    with pytest.raises(ConfigError) as error:
        architecture.check_layout(ParallelConfig(tensor_model_parallel_size=4), world_size=12)
    assert str(error.value) == (
        "tensor_model_parallel_size=4 neither divides 6 key-value heads nor is a multiple of them; expected one of "
        "[1, 2, 3, 6, 12]"
    )
    with pytest.raises(ConfigError) as error:
        architecture.check_layout(ParallelConfig(tensor_model_parallel_size=24), world_size=24)
    assert "tensor_model_parallel_size=24 does not divide 12 attention heads" in str(error.value)


def test_adapters_of_a_part_of_a_group_are_refused() -> None:
    architecture, parallel = (
        Architecture(CONFIGS["llama"]),
        ParallelConfig(tensor_model_parallel_size=4),
    )
    with pytest.raises(ConfigError) as error:
        check_targets(target_layers(architecture, LoRAConfig()), architecture, parallel)
    assert str(error.value) == (
        "tensor_model_parallel_size is 4 with adapters of queries, keys or values; expected at most 2, the number of "
        "key-value heads, or other target_modules"
    )
    others = target_layers(architecture, LoRAConfig(target_modules=("o_proj", "up_proj")))
    check_targets(others, architecture, parallel)
    check_targets(frozenset(), architecture, parallel)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_router_of_experts_needs_no_transformer_engine(device: str) -> None:
    """Megatron-Core 0.16.1 leaves a name unbound that its router reads on every device."""
    from megatron.core.transformer.moe import moe_utils

    with megatron_runtime(torch.device(device)):
        inputs, weight = (
            torch.randn(5, 8, requires_grad=True),
            torch.randn(4, 8, requires_grad=True),
        )
        logits = moe_utils.router_gating_linear(inputs, weight, None, torch.float32)
        torch.testing.assert_close(logits, inputs @ weight.T)
        logits.sum().backward()
    torch.testing.assert_close(weight.grad, inputs.detach().sum(0).expand(4, 8))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(), "model_type is 'gpt2'; expected one of llama, qwen2, qwen3, qwen3_moe"),
        (
            LlamaConfig(**SIZES, attention_bias=True),
            "attention_bias of 'llama' is True; expected False",
        ),
        (LlamaConfig(**SIZES, mlp_bias=True), "mlp_bias of 'llama' is True; expected False"),
        (
            LlamaConfig(**SIZES, hidden_act="gelu"),
            "hidden_act of 'llama' is 'gelu'; expected 'silu'",
        ),
        (
            Qwen2Config(**SIZES, use_sliding_window=True),
            "use_sliding_window of 'qwen2' is True; expected False",
        ),
        (
            Qwen2Config(**SIZES, layer_types=["sliding_attention", "full_attention"]),
            "layer_types of 'qwen2' has sliding_attention; expected full_attention only",
        ),
        (
            LlamaConfig(**QUANTIZED),
            "quantization_config of 'llama' is {'quant_method': 'fp8'}; expected None",
        ),
        (
            LlamaConfig(
                **SIZES,
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                },
            ),
            "partial_rotary_factor of 'llama' is 0.5; expected 1.0",
        ),
        (
            Qwen3MoeConfig(**SIZES, **MOE, mlp_only_layers=[0]),
            "mlp_only_layers of 'qwen3_moe' is [0]; expected []",
        ),
        (
            LlamaConfig(
                **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
            ),
            "rope_type of 'llama' is 'linear'; expected one of default, llama3",
        ),
    ],
    ids=str,
)
def test_what_is_not_converted_is_refused(config: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        Architecture(config)
    assert message in str(error.value)


def test_llama3_rotary_embeddings_are_accepted() -> None:
    Architecture(LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE))


@pytest.mark.slow
def test_a_process_has_one_layout(ranks: RankPool, tmp_path: Path) -> None:
    path = save_megatron_model("qwen3_tied", tmp_path)
    [error, *_] = ranks.errors("megatron_is_made", str(path), {TP: 2}, {TP: 2}, {PP: 2}, size=4)
    assert error.startswith(
        "ConfigError: parallel is ParallelConfig(tensor_model_parallel_size=1, "
    )
    assert "; expected ParallelConfig(tensor_model_parallel_size=2" in error
    assert error.endswith("the layout of this process: Megatron-Core has only one")


@pytest.mark.slow
def test_a_folder_without_a_tensor_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    path = save_megatron_model("qwen3_tied", tmp_path)
    (path / "config.json").write_text(
        (path / "config.json").read_text().replace('_embeddings": true', '_embeddings": false')
    )
    [error, *_] = ranks.errors("megatron_is_made", str(path), {}, size=4)
    assert error == f"UnsupportedModelError: {path} has no tensor 'lm_head.weight'"


@pytest.mark.slow
def test_a_folder_with_tensors_that_are_not_converted_is_refused(
    ranks: RankPool, tmp_path: Path
) -> None:
    path = save_megatron_model("qwen3_tied", tmp_path)
    weights = load_file(path / "model.safetensors")
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(4)}
    scales = {f"model.layers.{i}.mlp.up_proj.weight_scale_inv": torch.ones(1) for i in range(4)}
    save_file(weights | old | scales, path / "model.safetensors", metadata={"format": "pt"})
    [error, *_] = ranks.errors("megatron_is_made", str(path), {}, size=4)
    assert error == (
        f"UnsupportedModelError: {path} has tensors model.layers.*.mlp.up_proj.weight_scale_inv, which the Megatron "
        "backend does not convert"
    )


def test_without_the_extra_the_error_holds_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(TrainerError, match=r"pip install 'gcore-trainer\[megatron\]'"):
        runpy.run_path(gcore_trainer.megatron.__file__)


@given(
    shape=st.one_of(
        st.tuples(st.integers(1, 9)),
        st.tuples(st.integers(1, 6), st.integers(1, 6)),
        st.tuples(st.just(1), st.integers(1, 6), st.integers(1, 6)),
    ),
    cuts=st.lists(st.integers(0, 50), max_size=4),
)
def test_ranges_of_a_parameter_are_boxes_that_make_up_the_piece(
    shape: tuple[int, ...], cuts: list[int]
) -> None:
    first = 5
    offset = tuple(range(3, 3 + len(shape)))
    piece = TensorPiece(
        name="w",
        global_shape=tuple(o + s for o, s in zip(offset, shape, strict=True)),
        offset=offset,
        shape=shape,
        start=first,
    )
    flat = torch.arange(60)
    whole = torch.full(piece.global_shape, -1)
    bounds = [0, *sorted(cuts), 60]
    for start, end in pairwise(bounds):
        boxes = list(piece.split_range(start, end))
        assert len(boxes) <= 3
        for box in boxes:
            target = whole[
                tuple(slice(o, o + s) for o, s in zip(box.offset, box.shape, strict=True))
            ]
            assert (target == -1).all()
            target.copy_(box.view(flat[start:end], start))
    assert torch.equal(whole[tuple(slice(o, None) for o in offset)], piece.view(flat))
