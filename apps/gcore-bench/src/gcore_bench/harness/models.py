"""Small random Qwen2 models that several benches measure with."""

import dataclasses
from pathlib import Path
from typing import Any

from gcore_placement import TransformerWorkload


def small_shape(hidden_size: int, *, layers: int, heads: int, vocab_size: int) -> TransformerWorkload:
    """Return a shape whose feed-forward layers are three times as wide, with two query heads to a key-value head."""
    return TransformerWorkload(
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden_size // heads,
        vocab_size=vocab_size,
    )


def make_model(folder: Path, shape: TransformerWorkload, *, max_length: int, seed: int) -> None:
    """Write a Qwen2 of this shape, whose next-token distributions are neither flat nor certain."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    sizes = dataclasses.asdict(shape)
    del sizes["head_dim"]
    tokens: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    config = Qwen2Config(**sizes, **tokens, max_position_embeddings=max_length, tie_word_embeddings=True)
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
