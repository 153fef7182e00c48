"""DiffusionNFT: the forward process is trained towards good images and away from bad ones."""

from typing import Annotated

import torch

from gcore_trainer.config import ConfigBound
from gcore_trainer.diffusion.losses import ForwardPass, column, forward_loss
from gcore_trainer.objectives.policy import LossAndMetrics


@forward_loss(needs_old=True)
def nft(
    forward: ForwardPass,
    *,
    beta: Annotated[float, ConfigBound(lambda v: 0 < v <= 1, "a number in (0, 1]")] = 0.1,
) -> LossAndMetrics:
    """Compute DiffusionNFT's loss (arXiv 2509.16117, eq. 8), with its self-normalised regression of x_0.

    r d(v+) + (1 - r) d(v-), times adv_clip_max / beta, with v+- = (1 -+ beta) v_old +- beta v and d the squared error
    of x_0 = x_s - s v+-, divided by its own mean absolute error (without gradient). r, in [0, 1], says how good the
    image is: 1 with an advantage of adv_clip_max, 0 with minus that. Of flow-matching models.
    """
    optimality = forward.optimality

    def regression(implicit: torch.Tensor) -> torch.Tensor:
        level = column(forward.level, forward.noised)
        error = forward.noised - level * implicit - forward.clean
        scale = error.detach().abs().flatten(1).mean(1).clamp(min=1e-5)
        return (error**2).flatten(1).mean(1) / scale

    positive = regression((1 - beta) * forward.old + beta * forward.policy)
    negative = regression((1 + beta) * forward.old - beta * forward.policy)
    losses = (optimality * positive + (1 - optimality) * negative) / beta
    return forward.adv_clip_max * losses, {}
