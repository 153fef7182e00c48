"""Training of RLHF policies: advantages, losses and backends."""

import importlib as _importlib
from typing import TYPE_CHECKING

from gcore_trainer.advantages.estimator import (
    AdvantageEstimator,
    AdvantagesAndReturns,
    ScoredGroup,
    advantage_estimator,
    advantage_estimators,
    get_advantage_estimator,
)
from gcore_trainer.advantages.estimators.gae import gae_advantages
from gcore_trainer.advantages.estimators.grpo import grpo_advantages
from gcore_trainer.advantages.estimators.reinforce_plus_plus import discounted_returns
from gcore_trainer.advantages.estimators.remax import remax_advantages
from gcore_trainer.advantages.estimators.rloo import rloo_advantages
from gcore_trainer.advantages.reward_shaping import (
    AdaptiveKLController,
    FixedKLController,
    RewardKL,
    kl_estimates,
    kl_rewards,
    overlong_penalty,
)
from gcore_trainer.advantages.rollout_correction import RolloutCorrectionConfig, rollout_correction, weight_moments
from gcore_trainer.advantages.whitening import whiten, whitening_moments
from gcore_trainer.config import (
    AdvantageConfig,
    DPOConfig,
    KLPenalty,
    LoRAConfig,
    LossAggMode,
    LRSchedulerType,
    OptimizerConfig,
    PolicyLossConfig,
    RewardModelConfig,
    ValueLossConfig,
)
from gcore_trainer.diffusion.config import DenoisingPolicyConfig, DiffusionDPOConfig, NFTConfig
from gcore_trainer.errors import (
    BatchError,
    ConfigError,
    MissingExtraError,
    NonFiniteGradientError,
    StateError,
    TrainerError,
    UnsupportedModelError,
)
from gcore_trainer.parallel import ParallelConfig
from gcore_trainer.sample import Images, MicroBatch, Sample

if TYPE_CHECKING:
    from gcore_trainer.diffusion.denoiser import Denoiser, pipeline_component
    from gcore_trainer.diffusion.ema import MovingAverage
    from gcore_trainer.diffusion.objectives import (
        DenoisingPolicyObjective,
        DiffusionDPOObjective,
        DiffusionObjective,
        NFTObjective,
        RewardGradientObjective,
    )
    from gcore_trainer.diffusion.process import DDPMProcess, FlowProcess, NoiseProcess
    from gcore_trainer.diffusion.sample import DiffusionMicroBatch, DiffusionSample
    from gcore_trainer.diffusion.trainer import DiffusionTrainer, step_means
    from gcore_trainer.lora import merge_lora
    from gcore_trainer.losses.aggregation import BatchTotals, aggregation_weights
    from gcore_trainer.losses.kl import kl_penalty
    from gcore_trainer.losses.policy_loss import (
        PolicyLoss,
        PolicyLossFunction,
        PolicyTokens,
        clipped_surrogate,
        policy_loss,
        policy_loss_function,
    )
    from gcore_trainer.losses.preference import bradley_terry_loss, dpo_loss
    from gcore_trainer.losses.value import explained_variance, value_loss, value_moments
    from gcore_trainer.megatron.trainer import MegatronTrainer
    from gcore_trainer.objectives.objective import Objective, PartialLoss
    from gcore_trainer.objectives.policy import PolicyObjective
    from gcore_trainer.objectives.preference import DPOObjective, RewardModelObjective, scored_at_end
    from gcore_trainer.objectives.sft import SFTObjective
    from gcore_trainer.objectives.value import ValueObjective
    from gcore_trainer.packing.pack import PackedBatch, pack
    from gcore_trainer.packing.token_scores import TokenScores, token_scores
    from gcore_trainer.torch.frozen_model import FrozenModel
    from gcore_trainer.torch.packed_model import PackedModel, PackedValueModel
    from gcore_trainer.torch.parallel import TorchParallel
    from gcore_trainer.torch.trainer import TorchTrainer
    from gcore_trainer.training.trainer import Trainer

__all__ = [
    "AdaptiveKLController",
    "AdvantageConfig",
    "AdvantageEstimator",
    "AdvantagesAndReturns",
    "BatchError",
    "BatchTotals",
    "ConfigError",
    "DDPMProcess",
    "DPOConfig",
    "DPOObjective",
    "Denoiser",
    "DenoisingPolicyConfig",
    "DenoisingPolicyObjective",
    "DiffusionDPOConfig",
    "DiffusionDPOObjective",
    "DiffusionMicroBatch",
    "DiffusionObjective",
    "DiffusionSample",
    "DiffusionTrainer",
    "FixedKLController",
    "FlowProcess",
    "FrozenModel",
    "Images",
    "KLPenalty",
    "LRSchedulerType",
    "LoRAConfig",
    "LossAggMode",
    "MegatronTrainer",
    "MicroBatch",
    "MissingExtraError",
    "MovingAverage",
    "NFTConfig",
    "NFTObjective",
    "NoiseProcess",
    "NonFiniteGradientError",
    "Objective",
    "OptimizerConfig",
    "PackedBatch",
    "PackedModel",
    "PackedValueModel",
    "ParallelConfig",
    "PartialLoss",
    "PolicyLoss",
    "PolicyLossConfig",
    "PolicyLossFunction",
    "PolicyObjective",
    "PolicyTokens",
    "RewardGradientObjective",
    "RewardKL",
    "RewardModelConfig",
    "RewardModelObjective",
    "RolloutCorrectionConfig",
    "SFTObjective",
    "Sample",
    "ScoredGroup",
    "StateError",
    "TokenScores",
    "TorchParallel",
    "TorchTrainer",
    "Trainer",
    "TrainerError",
    "UnsupportedModelError",
    "ValueLossConfig",
    "ValueObjective",
    "advantage_estimator",
    "advantage_estimators",
    "aggregation_weights",
    "bradley_terry_loss",
    "clipped_surrogate",
    "discounted_returns",
    "dpo_loss",
    "explained_variance",
    "gae_advantages",
    "get_advantage_estimator",
    "grpo_advantages",
    "kl_estimates",
    "kl_penalty",
    "kl_rewards",
    "merge_lora",
    "overlong_penalty",
    "pack",
    "pipeline_component",
    "policy_loss",
    "policy_loss_function",
    "remax_advantages",
    "rloo_advantages",
    "rollout_correction",
    "scored_at_end",
    "step_means",
    "token_scores",
    "value_loss",
    "value_moments",
    "weight_moments",
    "whiten",
    "whitening_moments",
]

_LAZY = {
    "gcore_trainer.diffusion.denoiser": ["Denoiser", "pipeline_component"],
    "gcore_trainer.diffusion.ema": ["MovingAverage"],
    "gcore_trainer.diffusion.objectives": [
        "DenoisingPolicyObjective",
        "DiffusionDPOObjective",
        "DiffusionObjective",
        "NFTObjective",
        "RewardGradientObjective",
    ],
    "gcore_trainer.diffusion.process": ["DDPMProcess", "FlowProcess", "NoiseProcess"],
    "gcore_trainer.diffusion.sample": ["DiffusionMicroBatch", "DiffusionSample"],
    "gcore_trainer.diffusion.trainer": ["DiffusionTrainer", "step_means"],
    "gcore_trainer.lora": ["merge_lora"],
    "gcore_trainer.losses.aggregation": ["BatchTotals", "aggregation_weights"],
    "gcore_trainer.losses.kl": ["kl_penalty"],
    "gcore_trainer.losses.policy_loss": [
        "PolicyLoss",
        "PolicyLossFunction",
        "PolicyTokens",
        "clipped_surrogate",
        "policy_loss",
        "policy_loss_function",
    ],
    "gcore_trainer.losses.preference": ["bradley_terry_loss", "dpo_loss"],
    "gcore_trainer.losses.value": ["explained_variance", "value_loss", "value_moments"],
    "gcore_trainer.megatron.trainer": ["MegatronTrainer"],
    "gcore_trainer.objectives.objective": ["Objective", "PartialLoss"],
    "gcore_trainer.objectives.policy": ["PolicyObjective"],
    "gcore_trainer.objectives.preference": ["DPOObjective", "RewardModelObjective", "scored_at_end"],
    "gcore_trainer.objectives.sft": ["SFTObjective"],
    "gcore_trainer.objectives.value": ["ValueObjective"],
    "gcore_trainer.packing.pack": ["PackedBatch", "pack"],
    "gcore_trainer.packing.token_scores": ["TokenScores", "token_scores"],
    "gcore_trainer.torch.frozen_model": ["FrozenModel"],
    "gcore_trainer.torch.packed_model": ["PackedModel", "PackedValueModel"],
    "gcore_trainer.torch.parallel": ["TorchParallel"],
    "gcore_trainer.torch.trainer": ["TorchTrainer"],
    "gcore_trainer.training.trainer": ["Trainer"],
}
"""Names that are imported when they are first asked for, because their modules import torch."""
_MODULE_OF = {_name: _module for _module, _names in _LAZY.items() for _name in _names}


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(_importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
