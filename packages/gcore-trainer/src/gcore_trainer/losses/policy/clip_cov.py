"""Clip-Cov: some of the tokens that would lower the entropy most have no gradient."""

import torch

from gcore_trainer.config import FractionAbove0, PolicyLossConfig
from gcore_trainer.objectives.policy import LossAndMetrics, PolicyTokens, clipped_surrogate


def clip_cov(
    tokens: PolicyTokens,
    config: PolicyLossConfig,
    *,
    clip_cov_ratio: FractionAbove0 = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> LossAndMetrics:
    """Compute PPO's `clipped_surrogate`, and 0 for a share of the tokens with a covariance in (lb, ub).

    Cui et al. (arXiv 2505.22617, eq. 11): a share ``clip_cov_ratio`` of all tokens, at least one, is drawn from those
    that PPO does not clip and whose covariance of log-probability and advantage (`PolicyTokens.covariances`) is in the
    range. The choice is random, and the same for the same number of tokens to choose from. As in verl, it is made in
    each micro-batch.
    """
    loss, is_clipped = clipped_surrogate(
        tokens.ratio, tokens.advantages, low=config.clip_ratio_low, high=config.clip_ratio_high
    )
    covariances = tokens.covariances
    is_inside = (covariances > clip_cov_lb) & (covariances < clip_cov_ub) & ~is_clipped
    candidates = torch.nonzero(is_inside & tokens.mask)[:, 0]
    # Ranks that share the tokens of a micro-batch make the same choice.
    generator = torch.Generator().manual_seed(candidates.numel())
    order = torch.randperm(candidates.numel(), generator=generator).to(candidates.device)
    chosen = candidates[order[: tokens.share(clip_cov_ratio)]]
    is_cut = torch.zeros_like(tokens.mask).index_fill(0, chosen, True)
    return loss.masked_fill(is_cut, 0.0), {"actor/pg_clipfrac": is_cut}
