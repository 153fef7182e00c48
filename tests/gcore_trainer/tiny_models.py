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

_NAMES_OF_SIZES = (
    (
        1,
        """first_k_dense_replace max_window_layers moe_num_shared_experts n_group n_shared_experts num_dense_layers
        num_expert_group num_shared_experts topk_group""",
    ),
    (
        2,
        """decoder_layers encoder_layers linear_num_key_heads moe_k moe_topk multi_query_group_num n_layer n_layers
        num_blocks num_decoder_layers num_encoder_layers num_experts_per_tok num_experts_per_token num_hidden_layers
        num_key_value_heads num_kv_heads num_layers top_k_experts zero_expert_num""",
    ),
    (
        4,
        """attention_heads decoder_attention_heads encoder_attention_heads linear_num_value_heads mamba_num_heads
        moe_num_experts n_head n_heads n_routed_experts num_attention_heads num_decoder_attention_heads
        num_encoder_attention_heads num_experts num_heads num_local_experts""",
    ),
    (
        8,
        """
        adapter_rank hidden_size_per_layer_input index_head_dim laurel_rank mamba_d_state mamba_dt_rank qk_nope_head_dim
        qk_rope_head_dim rotary_dim router_hidden_size ssm_state_size state_size time_step_rank""",
    ),
    (
        16,
        """attention_head_dim block_size chunk_size head_dim kv_channels kv_lora_rank linear_key_head_dim
        linear_value_head_dim mamba_chunk_size mamba_d_head mamba_headdim mamba_n_heads q_lora_rank v_head_dim""",
    ),
    (32, "intermediate_size_mlp moe_intermediate_size shared_expert_intermediate_size"),
    (
        64,
        "d_model emb_dim embed_dim embedding_size hidden_size hidden_size_global n_embd word_embed_proj_dim",
    ),
    (96, "decoder_ffn_dim encoder_ffn_dim ffn_dim ffn_hidden_size intermediate_size n_inner"),
    (256, "context_length max_position_embeddings max_seq_len n_ctx n_positions"),
    (
        WINDOW,
        """attention_chunk_size attention_window_size keep_window_size local_attention sliding_window
        sliding_window_size window_size""",
    ),
    (
        VOCAB_SIZE,
        "audio_vocab_size encoder_hash_byte_group_vocab vocab_size vocab_size_per_layer_input",
    ),
)
_SIZES = {name: size for size, names in _NAMES_OF_SIZES for name in names.split()}
_SWITCHES: dict[str, Any] = {
    "use_sliding_window": True,
    "is_decoder": True,
    "num_kv_shared_layers": 0,
}
_MAMBA_2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_expand": 2,
}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA_2, "attn_layer_indices": [1]},
    "cohere_compass_text": {
        "head_dim": 128,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "dbrx": {
        "d_model": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "hidden_size": 64,
            "ffn_hidden_size": 96,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "falcon_h1": {**_MAMBA_2, "num_hidden_layers": 2},
    "gemma3n_text": {"intermediate_size": [96, 96], "activation_sparsity_pattern": [0.95, 0.0]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {**_MAMBA_2, "layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 1,
        "ple_embed_dim": 64,
        "ngram_vocab_size_base": 96,
    },
    "reformer": {
        "axial_pos_embds": False,
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "mamba_headdim": 16},
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings of single types."""

_NO_FOLDER = "transformers saves a folder that AutoModelForCausalLM does not load"
_NO_DEFAULT = "transformers has no default configuration"
_DRAFT = "it drafts tokens for another model, from that model's states"
UNBUILT = {
    "emu3": _NO_FOLDER,
    "gemma3n": "its image encoder needs timm; see gemma3n_text",
    "gemma4_assistant": _DRAFT,
    "gemma4_unified_assistant": _DRAFT,
    "mllama": _NO_FOLDER,
    "musicgen": _NO_DEFAULT,
    "musicgen_melody": _NO_DEFAULT,
}
"""Types of which there is no tiny model, and why."""


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return a configuration of a few thousand parameters, with the parts that the default one has."""
    default = CONFIG_MAPPING[model_type]()
    return type(default)(**_shrunk(default))


def _shrunk(default: PreTrainedConfig) -> dict[str, Any]:
    own = default.to_dict()
    values = {name: value for name, value in {**_SIZES, **_SWITCHES}.items() if name in own}
    if "qk_rope_head_dim" in own:
        values |= {"head_dim": 8, "qk_head_dim": 16, "num_key_value_heads": 4}
    if (own.get("pad_token_id") or 0) >= VOCAB_SIZE:
        values["pad_token_id"] = 0
    if layer_types := own.get("layer_types"):
        kinds = list(dict.fromkeys(layer_types))
        if own.get("sliding_window") and set(kinds) <= {"full_attention", "sliding_attention"}:
            kinds = ["sliding_attention", "full_attention"]
        values["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        values["num_hidden_layers"] = len(values["layer_types"])
    for name in default.sub_configs:
        if isinstance(part := getattr(default, name, None), PreTrainedConfig):
            values[name] = _shrunk(part)
    return values | _OWN.get(default.model_type, {})
