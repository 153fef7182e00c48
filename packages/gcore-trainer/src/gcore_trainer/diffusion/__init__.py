"""Reinforcement learning of diffusion and flow-matching models."""

from gcore_trainer.diffusion.config import DenoisingPolicyConfig, DiffusionDPOConfig, NFTConfig
from gcore_trainer.diffusion.objectives import (
    DiffusionDPOObjective,
    DiffusionObjective,
    NFTObjective,
    PolicyGradientObjective,
    RewardGradientObjective,
)
from gcore_trainer.diffusion.process import DDPMProcess, FlowProcess, NoiseProcess
from gcore_trainer.diffusion.types import Conditioned, DiffusionMicroBatch, DiffusionSample

__all__ = [
    "Conditioned",
    "DDPMProcess",
    "DenoisingPolicyConfig",
    "DiffusionDPOConfig",
    "DiffusionDPOObjective",
    "DiffusionMicroBatch",
    "DiffusionObjective",
    "DiffusionSample",
    "FlowProcess",
    "NFTConfig",
    "NFTObjective",
    "NoiseProcess",
    "PolicyGradientObjective",
    "RewardGradientObjective",
]
