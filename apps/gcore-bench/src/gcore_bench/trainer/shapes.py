"""Shapes of the models that the command makes, known before torch is imported."""

from gcore_bench.trainer.options import TrainerOptions
from gcore_placement import TransformerWorkload

LAYERS = 4
HEADS = 4
LONG_LAYERS = 2
LONG_HEADS = 8
"""Ulysses ranks divide them."""
LONG_VOCAB_SIZE = 512


def step_workload(options: TrainerOptions) -> TransformerWorkload:
    """What the sequences of the step cost."""
    return _shape(options.hidden_size, layers=LAYERS, heads=HEADS, vocab_size=options.vocab_size)


def long_workload(options: TrainerOptions) -> TransformerWorkload:
    """What the sequences of the part context cost."""
    return _shape(options.hidden_size, layers=LONG_LAYERS, heads=LONG_HEADS, vocab_size=LONG_VOCAB_SIZE)


def _shape(hidden_size: int, *, layers: int, heads: int, vocab_size: int) -> TransformerWorkload:
    return TransformerWorkload(
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden_size // heads,
        vocab_size=vocab_size,
    )
