"""Parameter counts against transformers' own, and what follows from them."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gcore_placement import ModelShape, PlacementError, TransformerWorkload

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
}
MIXTURE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "head_dim": 24,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 2,
    "n_group": 2,
    "topk_group": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL},
    "llama with biases": {"model_type": "llama", **SMALL, "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", **SMALL, "head_dim": 32},
    "qwen2": {"model_type": "qwen2", **SMALL},
    "qwen2, tied": {"model_type": "qwen2", **SMALL, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **SMALL},
    "qwen3 with biases": {
        "model_type": "qwen3",
        **SMALL,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "qwen3-moe": {"model_type": "qwen3_moe", **SMALL, **MIXTURE},
    "qwen3-moe, in part dense": {
        "model_type": "qwen3_moe",
        **SMALL,
        **MIXTURE,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "mixtral": {"model_type": "mixtral", **SMALL, "num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek-v3": {"model_type": "deepseek_v3", **SMALL, **LATENT},
    "deepseek-v3 with biases": {
        "model_type": "deepseek_v3",
        **SMALL,
        **LATENT,
        "attention_bias": True,
    },
    "deepseek-v3, queries as they are": {
        "model_type": "deepseek_v3",
        **SMALL,
        **LATENT,
        "q_lora_rank": None,
    },
    "deepseek-v2": {"model_type": "deepseek_v2", **SMALL, **LATENT, "first_k_dense_replace": 0},
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
}
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def model_of(config: dict[str, Any]) -> torch.nn.Module:
    known = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **known))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_parameters_are_those_of_transformers(config: dict[str, Any]) -> None:
    model: Any = model_of(config)
    assert ModelShape.from_config(config).num_parameters == model.num_parameters()


def test_a_mixture_of_experts_is_as_large_as_its_name_says() -> None:
    """Qwen3-30B-A3B: 30.5B parameters, 3.3B of them active (its model card)."""
    shape = ModelShape.from_config(QWEN3_30B_A3B)
    assert shape.num_parameters == pytest.approx(30.5e9, rel=0.005)
    assert shape.num_active_parameters == pytest.approx(3.3e9, rel=0.02)


def test_deepseek_v3_is_as_large_as_its_report_says() -> None:
    """671B parameters, 37B of them active (arXiv 2412.19437), and 576 numbers of a token in a layer's cache."""
    shape = ModelShape.from_config(DEEPSEEK_V3)
    model: Any = model_of(DEEPSEEK_V3)
    assert shape.num_parameters == model.num_parameters() == pytest.approx(671e9, rel=0.001)
    assert shape.num_active_parameters == pytest.approx(37e9, rel=0.02)
    assert shape.kv_values_per_token == 61 * (512 + 64)


def test_latent_attention_multiplies_queries_and_values_of_other_widths() -> None:
    """A pair takes 2 FLOPs for each number of a query and of a value, three times with the backward pass."""
    workload = ModelShape.from_config(DEEPSEEK_V3).workload
    assert workload.flops_per_attended_pair == 3 * 61 * 128 * 2 * (192 + 128)


def test_adapters_of_latent_attention_are_on_each_of_its_matrices() -> None:
    model = model_of(CONFIGS["deepseek-v3"])
    adapted = 0
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and not name.startswith("lm_head"):
            adapted += 4 * (module.in_features + module.out_features)
    assert ModelShape.from_config(CONFIGS["deepseek-v3"]).adapter_parameters(4) == adapted


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_token_meets_each_active_matrix_once(config: dict[str, Any]) -> None:
    """FLOPs are 6 for each active weight that is a matrix's, and is not only looked up."""
    vectors = sum(p.numel() for p in model_of(config).parameters() if p.dim() == 1)
    shape = ModelShape.from_config(config)
    looked_up = 0 if shape.tie_word_embeddings else SMALL["vocab_size"] * SMALL["hidden_size"]
    matrices = shape.num_active_parameters - vectors - looked_up
    assert shape.num_multiplied_parameters == matrices + vectors
    assert shape.workload.flops_per_token == 6 * matrices


def test_more_tokens_read_more_experts() -> None:
    shape = ModelShape.from_config(CONFIGS["qwen3-moe"])
    read = shape.parameters_read(np.array([1.0, 2.0, 16.0, 10_000.0]))
    looked_up = shape.num_active_parameters - shape.num_multiplied_parameters
    assert looked_up == (
        0 if shape.tie_word_embeddings else SMALL["vocab_size"] * SMALL["hidden_size"]
    )
    assert read[0] == shape.num_multiplied_parameters
    assert read[-1] == pytest.approx(shape.num_parameters - looked_up)
    assert (np.diff(read) > 0).all()
    dense = ModelShape.from_config(CONFIGS["llama"])
    assert (dense.parameters_read(np.array([1.0, 9.0])) == dense.num_multiplied_parameters).all()


def test_keys_and_values() -> None:
    """Llama-3-8B's 128 KiB a token in bfloat16: 2 x 32 layers x 8 heads x 128 x 2 bytes."""
    config = {
        **SMALL,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    assert (
        2 * ModelShape.from_config({"model_type": "llama", **config}).kv_values_per_token
        == 128 * 1024
    )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; expected one of llama, .*"),
        ({"model_type": None}, "config has no 'model_type'"),
        ({"n_shared_experts": 1}, "n_shared_experts is 1; expected 0 without num_experts"),
        (
            {"shared_expert_intermediate_size": 8},
            r"shared_expert_intermediate_size is 8; expected absent",
        ),
        ({"kv_lora_rank": 8}, "config has no 'qk_nope_head_dim'"),
        ({**LATENT, "v_head_dim": 0}, "v_head_dim is 0; expected an integer of at least 1"),
        (
            {**LATENT, "first_k_dense_replace": -1},
            "first_k_dense_replace is -1; expected an integer of at least 0",
        ),
        ({"num_experts": 8}, "config has no 'num_experts_per_tok'"),
        (
            {"num_experts": 8, "num_experts_per_tok": 9},
            r"num_experts_per_tok is 9; expected at most num_experts \(8\)",
        ),
        (
            {"num_experts": 8, "num_experts_per_tok": 1, "mlp_only_layers": 3},
            r"mlp_only_layers is .*; expected a list",
        ),
        (
            {"num_experts": 8, "num_experts_per_tok": 1, "decoder_sparse_step": -1},
            r"decoder_sparse_step is .*; expected",
        ),
        (
            {"num_experts": "8", "num_experts_per_tok": 1},
            "num_experts is '8'; expected an integer of at least 1",
        ),
    ],
)
def test_a_wrong_config_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        ModelShape.from_config({**CONFIGS["llama"], **changed})


def test_half_a_mixture_is_refused() -> None:
    with pytest.raises(PlacementError, match="q_lora_rank is 8; expected 0 without kv_lora_rank"):
        TransformerWorkload(**SMALL, head_dim=16, q_lora_rank=8)
    latent = {
        name: LATENT[name]
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    }
    with pytest.raises(PlacementError, match=r"head_dim is 16; expected .* \(12 \+ 8\)"):
        TransformerWorkload(**SMALL, head_dim=16, **latent)
    with pytest.raises(
        PlacementError, match="num_experts_per_tok is 0; expected an integer of at least 1"
    ):
        TransformerWorkload(**SMALL, head_dim=16, num_experts=4)
