"""DiffusionOPD: the policy learns a teacher's steps from the latents that it comes across itself."""

from typing import Annotated

import torch

from gcore_trainer.config import ConfigBound
from gcore_trainer.diffusion.config import DenoisingPolicyConfig
from gcore_trainer.diffusion.losses import DenoisingStep, denoising_loss, gaussian_kl
from gcore_trainer.objectives.policy import LossAndMetrics


@denoising_loss("ref_means", metric="actor/distillation_loss")
def opd(
    step: DenoisingStep,
    _config: DenoisingPolicyConfig,
    *,
    teacher: Annotated[str, ConfigBound(bool, "the folder of a pipeline")] = "",
) -> LossAndMetrics:
    """Compute the KL divergence of the policy's step from the teacher's: DiffusionOPD (arXiv 2605.15055).

    (m - m_teacher)^2 / 2 std^2, a mean over dimensions, of the two Gaussians with one std; of a step without noise
    (m - m_teacher)^2 / 2, the distance of where the two lead. The teacher's means are the step's ``ref_means``:
    ``teacher`` names the folder of the pipeline whose model is to compute them, in place of the initial policy.
    """
    del teacher
    std = step.drawn.std.flatten()
    return gaussian_kl(step.drawn.mean, step.ref_means, torch.where(std > 0, std, 1.0)), {}
