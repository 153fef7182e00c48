"""Flow-DPPO: a step is left out once its Gaussian has moved too far, whatever the ratio of the latents drawn is."""

import torch

from gcore_trainer.config import AboveZero
from gcore_trainer.diffusion.config import DenoisingPolicyConfig
from gcore_trainer.diffusion.losses import (
    RATIO_FIELDS,
    DenoisingStep,
    denoising_loss,
    gaussian_kl,
    safe_ratio,
)
from gcore_trainer.objectives.policy import LossAndMetrics


@denoising_loss(*RATIO_FIELDS, "old_means")
def flow_dppo(
    step: DenoisingStep, _config: DenoisingPolicyConfig, *, kl_mask_threshold: AboveZero = 1e-5
) -> LossAndMetrics:
    """Compute -M A r with r = exp(log p - log p_old): Flow-DPPO (arXiv 2606.11025, eq. 17 and 18).

    M is 0 where the update leads away from the old policy (A > 0 and r > 1, or A < 0 and r < 1) and the divergence
    D = (m_old - m)^2 / 2 std^2 (eq. 14) is above ``kl_mask_threshold``, and 1 elsewhere. As in the published code, D is
    a mean over dimensions, as log-probabilities are here: 1e-5 to 1e-6 for images of 512 pixels.
    """
    ratio = safe_ratio(step.log_ratio)
    deviation = ratio.detach() - 1
    divergence = gaussian_kl(step.drawn.mean.detach(), step.old_means, step.drawn.std)
    is_masked = (step.advantage * deviation > 0) & (divergence > kl_mask_threshold)
    losses = torch.where(is_masked, 0.0, -step.advantage * ratio)
    return losses, {
        "actor/pg_clipfrac": is_masked,
        "actor/ratio_dev": deviation.abs(),
        "actor/old_kl": divergence,
    }
