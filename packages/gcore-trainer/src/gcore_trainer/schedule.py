"""The learning rate of a step."""

import math
from typing import assert_never

from gcore_trainer.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """The rate of the update after ``step`` updates.

    It rises linearly to ``lr`` over ``lr_warmup_steps``. Then it is constant, or falls to ``min_lr_ratio * lr`` at
    ``total_training_steps``: along a line, or along half a cosine (SGDR, arXiv 1608.03983, eq. 5), and stays there.
    """
    if step < config.lr_warmup_steps:
        return config.lr * (step + 1) / config.lr_warmup_steps
    if config.lr_scheduler_type == "constant":
        return config.lr
    span = max(1, config.total_training_steps - config.lr_warmup_steps)
    progress = min(1.0, (step - config.lr_warmup_steps) / span)
    match config.lr_scheduler_type:
        case "linear":
            left = 1.0 - progress
        case "cosine":
            left = (1.0 + math.cos(math.pi * progress)) / 2
        case _:
            assert_never(config.lr_scheduler_type)
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left)
