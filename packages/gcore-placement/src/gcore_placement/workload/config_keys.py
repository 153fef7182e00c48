"""Reading of the shape of a decoder from the keys of a Hugging Face `config.json`."""

from collections.abc import Mapping
from typing import Any, cast

from gcore_placement.errors import PlacementError, refusal

LATENT_FIELDS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def require_key(mapping: Mapping[str, object], key: str) -> object:
    """Return `mapping[key]`. Raises PlacementError where the key is missing or None."""
    value = mapping.get(key)
    if value is None:
        raise PlacementError(
            f"config has no {key!r}: expected the config.json of a Llama, Mistral, Mixtral, Qwen2, Qwen3, "
            f"Qwen3-MoE, DeepSeek-V2 or DeepSeek-V3 model, got the keys {sorted(mapping)}"
        )
    return value


def workload_fields(config: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields of a `TransformerWorkload`; see its `from_config`."""
    shared = config.get("shared_expert_intermediate_size")
    if shared:
        accepted = "absent (shared experts with a width of their own are not described)"
        raise refusal("shared_expert_intermediate_size", shared, accepted)
    names = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
    )
    sizes: dict[str, Any] = {key: require_key(config, key) for key in names}
    for key, value in sizes.items():
        _check_whole(key, value, least=1)
    shared_experts: Any = config.get("n_shared_experts") or 0
    return {
        **sizes,
        **_read_heads(config, sizes),
        **_read_mixture(config, sizes),
        "n_shared_experts": shared_experts,
    }


def _read_heads(config: Mapping[str, object], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the fields of attention's heads."""
    hidden_size = sizes["hidden_size"]
    heads = sizes["num_attention_heads"]
    if config.get("kv_lora_rank"):
        latent: dict[str, Any] = {key: require_key(config, key) for key in LATENT_FIELDS}
        for key, value in latent.items():
            _check_whole(key, value, least=1)
        head_dim = latent["qk_nope_head_dim"] + latent["qk_rope_head_dim"]
        queries: Any = config.get("q_lora_rank") or 0
        return {
            **latent,
            "q_lora_rank": queries,
            "num_key_value_heads": heads,
            "head_dim": head_dim,
        }
    if config.get("head_dim") is None and hidden_size % heads:
        raise PlacementError(
            f"config has no 'head_dim', and hidden_size ({hidden_size}) is not a multiple of "
            f"num_attention_heads ({heads}): give 'head_dim'"
        )
    fields: dict[str, Any] = {"num_key_value_heads": heads, "head_dim": hidden_size // heads}
    for key in fields:
        if config.get(key) is not None:
            fields[key] = config[key]
    return fields


def _read_mixture(config: Mapping[str, object], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the fields of the mixture of experts; none for a dense model."""
    num_experts: Any = (
        config.get("num_experts")
        or config.get("num_local_experts")
        or config.get("n_routed_experts")
    )
    if not num_experts:
        return {}
    dense_layers: Any = config.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list):
        raise refusal("mlp_only_layers", dense_layers, "a list of layers' indices")
    first_dense: Any = config.get("first_k_dense_replace") or 0
    _check_whole("first_k_dense_replace", first_dense, least=0)
    sparse_step: Any = config.get("decoder_sparse_step") or 1
    _check_whole("decoder_sparse_step", sparse_step, least=1)
    # Every decoder_sparse_step-th layer, but for those that are listed as dense (transformers' Qwen3MoeDecoderLayer),
    # and but for the first (its DeepseekV3DecoderLayer).
    moe_layers = set(range(sparse_step - 1, sizes["num_hidden_layers"], sparse_step))
    moe_layers = moe_layers.difference(dense_layers, range(first_dense))
    if not moe_layers:
        return {}
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": cast("int", require_key(config, "num_experts_per_tok")),
        "moe_intermediate_size": cast(
            "int", config.get("moe_intermediate_size") or sizes["intermediate_size"]
        ),
        "num_moe_layers": len(moe_layers),
    }


def _check_whole(key: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise refusal(key, value, f"an integer of at least {least}")
