"""AWM, advantage weighted matching: the loss of pretraining, weighted by advantages."""

import torch

from gcore_trainer.config import AboveZero, Fraction, NotNegative
from gcore_trainer.diffusion.losses import (
    ForwardPass,
    clipped_ratio_loss,
    forward_loss,
    squared_distance,
)
from gcore_trainer.objectives.policy import LossAndMetrics

_EPSILON = 1e-10


@forward_loss(needs_old=True)
def awm(
    forward: ForwardPass,
    *,
    clip_ratio: AboveZero = 1.0,
    ghuber_power: Fraction = 0.0,
    old_kl_coef: NotNegative = 1.0,
) -> LossAndMetrics:
    """Compute max(-A r, -A clip(r, 1 - clip_ratio, 1 + clip_ratio)) + old_kl_coef |v - v_old|^2 (arXiv 2509.25050).

    r = exp(l_old - l), where l = w(s) |v - (e - x_0)|^2 stands for minus the log-likelihood of the image. w is 1, as in
    the paper; with a ``ghuber_power`` p above 0, l is s / p ((|v - (e - x_0)|^2 + 1e-10)^p - 1e-10^p), as in the
    published runs with p = 0.25. A is the advantage over adv_clip_max, and squares are means over dimensions.

    The images are those of the old policy, the published code's ``off_policy``. With ``old_decay_max`` 0 the old policy
    is the present one, as is its default: r is 1 and its gradient that of l_old - l.
    """

    def cost(output: torch.Tensor) -> torch.Tensor:
        errors = forward.errors(output)
        if not ghuber_power:
            return errors
        powers = (errors + _EPSILON) ** ghuber_power - _EPSILON**ghuber_power
        return forward.level / ghuber_power * powers

    log_ratio = cost(forward.old) - cost(forward.policy)
    losses, metrics = clipped_ratio_loss(log_ratio, forward.unit_advantages, clip_ratio)
    old_kl = squared_distance(forward.policy, forward.old)
    return losses + old_kl_coef * old_kl, metrics | {"actor/old_kl": old_kl.detach()}
