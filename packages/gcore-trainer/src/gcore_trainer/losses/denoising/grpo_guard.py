"""GRPO-Guard: the clipped surrogate of a denoising step, of ratios without bias and of equal scale."""

from gcore_trainer.diffusion.config import DenoisingPolicyConfig
from gcore_trainer.diffusion.losses import (
    RATIO_FIELDS,
    DenoisingStep,
    clipped_ratio_loss,
    column,
    denoising_loss,
)
from gcore_trainer.objectives.policy import LossAndMetrics


@denoising_loss(*RATIO_FIELDS, "old_means")
def grpo_guard(step: DenoisingStep, config: DenoisingPolicyConfig) -> LossAndMetrics:
    """Compute the clipped loss of a log-ratio without its bias, divided by -dt (arXiv 2510.22319, eq. 8 and 11).

    A Gaussian's log-ratio is on average -|m - m_old|^2 / 2 std^2, below 0: the clip from above hardly ever acts, and
    the more seldom the larger std is. With that added, and in units of std, it is the mean over dimensions of
    e (m - m_old), e the noise that was drawn: the same at every step.
    """
    drawn = step.drawn
    noise = (step.next_latents - step.old_means) / column(drawn.std, drawn.mean)
    log_ratio = (noise * (drawn.mean - step.old_means)).flatten(1).mean(1)
    losses, metrics = clipped_ratio_loss(log_ratio, step.advantage, config.clip_ratio)
    return losses / -step.dt, metrics
