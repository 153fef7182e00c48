"""M2PO: the tokens furthest from the policy that sampled them are left out, until the others are near enough."""

import torch

from gcore_trainer.config import AboveZero, PolicyLossConfig
from gcore_trainer.objectives.policy import LossAndMetrics, PolicyTokens


def m2po(
    tokens: PolicyTokens, _config: PolicyLossConfig, *, m2_threshold: AboveZero = 0.04
) -> LossAndMetrics:
    """Compute -A r, and 0 for the tokens of the largest (log r)^2, so that its mean over the others is small.

    Zheng et al. (arXiv 2510.01161, section 4): the fewest tokens are left out with which that mean is below
    ``m2_threshold``. At least one is kept. As in AReaL, they are chosen in each micro-batch.
    """
    squares = (tokens.log_probs - tokens.old_log_probs).detach().square()
    smallest, order = squares.masked_fill(~tokens.mask, torch.inf).sort()
    counts = torch.arange(1, len(order) + 1, device=order.device)
    is_near = smallest.cumsum(0) / counts < m2_threshold
    num_kept = is_near.sum().clamp(min=1)
    is_cut = torch.ones_like(tokens.mask).index_fill(0, order[:num_kept], False)
    loss = -tokens.advantages * tokens.ratio
    return loss.masked_fill(is_cut, 0.0), {"actor/pg_clipfrac": is_cut}
