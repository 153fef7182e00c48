"""The models that benches make: Qwen2 in small."""

from gcore_placement import TransformerWorkload


def small_shape(hidden_size: int, *, layers: int, heads: int, vocab_size: int) -> TransformerWorkload:
    """With feed-forward layers of three times the hidden size, and two query heads to a key-value head."""
    return TransformerWorkload(
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden_size // heads,
        vocab_size=vocab_size,
    )
