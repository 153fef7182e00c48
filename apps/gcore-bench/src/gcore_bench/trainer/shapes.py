"""Shapes of the models that the command makes, known before torch is imported."""

from gcore_bench.shapes import small_shape
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
    return small_shape(options.hidden_size, layers=LAYERS, heads=HEADS, vocab_size=options.vocab_size)


def long_workload(options: TrainerOptions) -> TransformerWorkload:
    """What the sequences of the part context cost."""
    return small_shape(options.hidden_size, layers=LONG_LAYERS, heads=LONG_HEADS, vocab_size=LONG_VOCAB_SIZE)
