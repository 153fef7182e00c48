"""PPO's clipped surrogate of a denoising step: Flow-GRPO, and DDPO for models of DDPM's kind."""

from gcore_trainer.diffusion.config import DenoisingPolicyConfig
from gcore_trainer.diffusion.losses import (
    RATIO_FIELDS,
    DenoisingStep,
    clipped_ratio_loss,
    denoising_loss,
)
from gcore_trainer.objectives.policy import LossAndMetrics


@denoising_loss(*RATIO_FIELDS)
def flow_grpo(step: DenoisingStep, config: DenoisingPolicyConfig) -> LossAndMetrics:
    """Compute max(-A r, -A clip(r, 1 - clip_ratio, 1 + clip_ratio)) with r = exp(log p - log p_old).

    DDPO (arXiv 2305.13301, eq. 6, clipped as its section 4.2 says) and Flow-GRPO (arXiv 2505.05470, eq. 5).
    """
    return clipped_ratio_loss(step.log_ratio, step.advantage, config.clip_ratio)
