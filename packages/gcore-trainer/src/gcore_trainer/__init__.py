"""How RLHF policies learn: advantages, losses and training backends."""

from gcore_trainer.advantages import grpo_advantages
from gcore_trainer.config import KLPenalty, LossAggMode, OptimizerConfig, PolicyLossConfig
from gcore_trainer.errors import (
    BatchError,
    ConfigError,
    NonFiniteGradientError,
    StateError,
    TrainerError,
    UnsupportedModelError,
)
from gcore_trainer.types import Images, MicroBatch, Sample

__all__ = [
    "BatchError",
    "ConfigError",
    "Images",
    "KLPenalty",
    "LossAggMode",
    "MicroBatch",
    "NonFiniteGradientError",
    "OptimizerConfig",
    "PolicyLossConfig",
    "Sample",
    "StateError",
    "TrainerError",
    "UnsupportedModelError",
    "grpo_advantages",
]
