from .advantages.distillation import (
    add_distillation as add_distillation,
)
from .advantages.estimator import (
    AdvantageEstimator as AdvantageEstimator,
    KLController as KLController,
    ScoredGroup as ScoredGroup,
    add_advantages as add_advantages,
    advantage_estimator as advantage_estimator,
    check_finite_tokens as check_finite_tokens,
    get_advantage_estimator as get_advantage_estimator,
    rollout_mismatch as rollout_mismatch,
)
from .advantages.estimators.gae import gae_advantages as gae_advantages
from .advantages.estimators.grpo import grpo_advantages as grpo_advantages
from .advantages.reward_shaping import (
    follow_divergence as follow_divergence,
    kl_rewards as kl_rewards,
    overlong_penalty as overlong_penalty,
)
from .advantages.rollout_correction import (
    add_rollout_correction as add_rollout_correction,
    rollout_correction as rollout_correction,
)
from .config import (
    DPOConfig as DPOConfig,
    KLControlConfig as KLControlConfig,
    LossAggMode as LossAggMode,
    LRSchedulerType as LRSchedulerType,
    MegatronConfig as MegatronConfig,
    OptimizerConfig as OptimizerConfig,
    OptimizerName as OptimizerName,
    OverlongConfig as OverlongConfig,
    ParallelConfig as ParallelConfig,
    PolicyLossConfig as PolicyLossConfig,
    RewardModelLossConfig as RewardModelLossConfig,
    RolloutCorrectionConfig as RolloutCorrectionConfig,
    ValueLossConfig as ValueLossConfig,
    get_policy_loss as get_policy_loss,
    options_type as options_type,
)
from .diffusion.config import DenoisingPolicyConfig as DenoisingPolicyConfig
from .diffusion.denoiser import Denoiser as Denoiser, pipeline_component as pipeline_component
from .diffusion.lora_file import read_component_lora_config as read_component_lora_config
from .diffusion.losses import DDPMProcess as DDPMProcess, FlowProcess as FlowProcess
from .diffusion.objectives import (
    DenoisingPolicyObjective as DenoisingPolicyObjective,
    DiffusionObjective as DiffusionObjective,
    ForwardObjective as ForwardObjective,
    RewardGradientObjective as RewardGradientObjective,
    diffusion_options as diffusion_options,
)
from .diffusion.sample import (
    DiffusionMicroBatch as DiffusionMicroBatch,
    DiffusionSample as DiffusionSample,
)
from .diffusion.trainer import (
    DiffusionTrainer as DiffusionTrainer,
    MovingAverage as MovingAverage,
)
from .errors import (
    BatchError as BatchError,
    ConfigError as ConfigError,
    StateError as StateError,
    TrainerError as TrainerError,
    UnsupportedModelError as UnsupportedModelError,
)
from .extras import check_extras as check_extras
from .lora import (
    LoRAWeights as LoRAWeights,
    merge_lora as merge_lora,
    read_adapters as read_adapters,
)
from .lora_config import LoRAConfig as LoRAConfig, read_lora_config as read_lora_config
from .megatron.trainer import MegatronTrainer as MegatronTrainer
from .objectives.objective import (
    BatchTotals as BatchTotals,
    Objective as Objective,
    TokenScores as TokenScores,
    aggregation_weights as aggregation_weights,
)
from .objectives.policy import (
    PolicyObjective as PolicyObjective,
    PolicyTokens as PolicyTokens,
    kl_penalty as kl_penalty,
    policy_loss as policy_loss,
    policy_loss_function as policy_loss_function,
)
from .objectives.supervised import (
    DPOObjective as DPOObjective,
    RewardModelObjective as RewardModelObjective,
    SFTObjective as SFTObjective,
    scored_at_end as scored_at_end,
)
from .objectives.value import (
    ValueObjective as ValueObjective,
)
from .packing.head import token_scores as token_scores
from .sample import (
    Images as Images,
    MicroBatch as MicroBatch,
    Sample as Sample,
    cut_at_forks as cut_at_forks,
)
from .torch.activations import LARGE_MODEL as LARGE_MODEL
from .torch.compiled import compile_layers as compile_layers
from .torch.frozen_model import FrozenModel as FrozenModel
from .torch.packed_model import PackedModel as PackedModel
from .torch.parallel import (
    SHARE_OF_GRADIENTS as SHARE_OF_GRADIENTS,
    TorchParallel as TorchParallel,
    should_replicate as should_replicate,
)
from .torch.value_model import PackedValueModel as PackedValueModel
from .trainer import TorchTrainer as TorchTrainer, Trainer as Trainer
