"""How RLHF policies learn: advantages, losses and training backends."""

from gcore_trainer.advantages import grpo_advantages
from gcore_trainer.config import OptimizerConfig, PolicyLossConfig
from gcore_trainer.types import MicroBatch, Sample

__all__ = ["MicroBatch", "OptimizerConfig", "PolicyLossConfig", "Sample", "grpo_advantages"]
