"""Tiny configurations of every causal LM of transformers.

A default configuration is made small by the names of its sizes; what a model needs beyond that is in `_OWN`.
"""

from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES: tuple[str, ...] = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
WINDOW = 8
VOCAB_SIZE = 96

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers", "num_blocks")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads")
_SIZES: dict[str, int] = {
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim"), 96),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), 32),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_num_shared_experts", "max_window_layers"), 1),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size", "sliding_window_size", "local_attention"), WINDOW),
    **dict.fromkeys(("attention_chunk_size", "keep_window_size"), WINDOW),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 256),
    **dict.fromkeys(("head_dim", "kv_channels", "attention_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "rotary_dim", "index_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(("linear_num_key_heads",), 2),
    **dict.fromkeys(("linear_num_value_heads",), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "vocab_size": VOCAB_SIZE,
}
_SWITCHES: dict[str, Any] = {"use_sliding_window": True, "pad_token_id": None}
_OWN: dict[str, dict[str, Any]] = {}
"""Settings of one type."""


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A configuration of a few thousand parameters with the parts that the default one has."""
    default = CONFIG_MAPPING[model_type]()
    return CONFIG_MAPPING[model_type](**{**_shrunk(default), **_OWN.get(model_type, {})})


def _shrunk(default: PreTrainedConfig) -> dict[str, Any]:
    own = default.to_dict()
    values = {name: value for name, value in {**_SIZES, **_SWITCHES}.items() if name in own}
    if layer_types := own.get("layer_types"):
        kinds = list(dict.fromkeys(layer_types))
        values["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        values["num_hidden_layers"] = len(values["layer_types"])
    for name in default.sub_configs:
        if isinstance(part := getattr(default, name, None), PreTrainedConfig):
            values[name] = _shrunk(part)
    return values
