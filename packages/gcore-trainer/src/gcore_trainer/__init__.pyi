from .advantages.estimator import (
    AdvantageEstimator as AdvantageEstimator,
    AdvantagesAndReturns as AdvantagesAndReturns,
    ScoredGroup as ScoredGroup,
    advantage_estimator as advantage_estimator,
    advantage_estimators as advantage_estimators,
    get_advantage_estimator as get_advantage_estimator,
)
from .advantages.estimators.gae import gae_advantages as gae_advantages
from .advantages.estimators.grpo import grpo_advantages as grpo_advantages
from .advantages.estimators.reinforce_plus_plus import discounted_returns as discounted_returns
from .advantages.estimators.remax import remax_advantages as remax_advantages
from .advantages.estimators.rloo import rloo_advantages as rloo_advantages
from .advantages.reward_shaping import (
    AdaptiveKLController as AdaptiveKLController,
    FixedKLController as FixedKLController,
    RewardKL as RewardKL,
    kl_estimates as kl_estimates,
    kl_rewards as kl_rewards,
    overlong_penalty as overlong_penalty,
)
from .advantages.rollout_correction import (
    RolloutCorrectionConfig as RolloutCorrectionConfig,
    rollout_correction as rollout_correction,
    weight_moments as weight_moments,
)
from .advantages.shaping_config import KLControlConfig as KLControlConfig, OverlongConfig as OverlongConfig
from .advantages.whitening import whiten as whiten, whitening_moments as whitening_moments
from .config import (
    AdvantageConfig as AdvantageConfig,
    DPOConfig as DPOConfig,
    KLPenalty as KLPenalty,
    LoRAConfig as LoRAConfig,
    LossAggMode as LossAggMode,
    LRSchedulerType as LRSchedulerType,
    OptimizerConfig as OptimizerConfig,
    PolicyLossConfig as PolicyLossConfig,
    RewardModelConfig as RewardModelConfig,
    ValueLossConfig as ValueLossConfig,
)
from .diffusion.config import (
    DenoisingPolicyConfig as DenoisingPolicyConfig,
    DiffusionDPOConfig as DiffusionDPOConfig,
    NFTConfig as NFTConfig,
)
from .diffusion.denoiser import Denoiser as Denoiser, pipeline_component as pipeline_component
from .diffusion.ema import MovingAverage as MovingAverage
from .diffusion.objectives import (
    DenoisingPolicyObjective as DenoisingPolicyObjective,
    DiffusionDPOObjective as DiffusionDPOObjective,
    DiffusionObjective as DiffusionObjective,
    NFTObjective as NFTObjective,
    RewardGradientObjective as RewardGradientObjective,
)
from .diffusion.process import DDPMProcess as DDPMProcess, FlowProcess as FlowProcess, NoiseProcess as NoiseProcess
from .diffusion.sample import DiffusionMicroBatch as DiffusionMicroBatch, DiffusionSample as DiffusionSample
from .diffusion.trainer import DiffusionTrainer as DiffusionTrainer, step_means as step_means
from .errors import (
    BatchError as BatchError,
    ConfigError as ConfigError,
    MissingExtraError as MissingExtraError,
    NonFiniteGradientError as NonFiniteGradientError,
    StateError as StateError,
    TrainerError as TrainerError,
    UnsupportedModelError as UnsupportedModelError,
)
from .lora import merge_lora as merge_lora
from .losses.aggregation import BatchTotals as BatchTotals, aggregation_weights as aggregation_weights
from .losses.kl import kl_penalty as kl_penalty
from .losses.policy_loss import (
    PolicyLoss as PolicyLoss,
    PolicyLossFunction as PolicyLossFunction,
    PolicyTokens as PolicyTokens,
    clipped_surrogate as clipped_surrogate,
    policy_loss as policy_loss,
    policy_loss_function as policy_loss_function,
)
from .losses.preference import bradley_terry_loss as bradley_terry_loss, dpo_loss as dpo_loss
from .losses.value import (
    explained_variance as explained_variance,
    value_loss as value_loss,
    value_moments as value_moments,
)
from .megatron.trainer import MegatronTrainer as MegatronTrainer
from .objectives.objective import Objective as Objective, PartialLoss as PartialLoss
from .objectives.policy import PolicyObjective as PolicyObjective
from .objectives.preference import (
    DPOObjective as DPOObjective,
    RewardModelObjective as RewardModelObjective,
    scored_at_end as scored_at_end,
)
from .objectives.sft import SFTObjective as SFTObjective
from .objectives.value import ValueObjective as ValueObjective
from .packing.pack import PackedBatch as PackedBatch, pack as pack
from .packing.token_scores import TokenScores as TokenScores, token_scores as token_scores
from .parallel import ParallelConfig as ParallelConfig
from .sample import Images as Images, MicroBatch as MicroBatch, Sample as Sample
from .torch.frozen_model import FrozenModel as FrozenModel
from .torch.packed_model import PackedModel as PackedModel, PackedValueModel as PackedValueModel
from .torch.parallel import TorchParallel as TorchParallel
from .torch.trainer import TorchTrainer as TorchTrainer
from .training.trainer import Trainer as Trainer
