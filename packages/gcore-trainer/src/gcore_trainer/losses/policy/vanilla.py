"""PPO's clipped surrogate, with DAPO's higher upper clip and the dual clip of negative advantages."""

import torch

from gcore_trainer.config import PolicyLossConfig
from gcore_trainer.objectives.policy import (
    LossAndMetrics,
    PolicyTokens,
    clipped_surrogate,
    policy_loss_function,
)


@policy_loss_function(has_dual_clip=True)
def vanilla(tokens: PolicyTokens, config: PolicyLossConfig) -> LossAndMetrics:
    """Compute PPO's `clipped_surrogate` (arXiv 1707.06347, eq. 7).

    ``clip_ratio_high`` > ``clip_ratio_low`` is DAPO's clip-higher (arXiv 2503.14476, section 3.1). With
    ``clip_ratio_c`` > 1 and A < 0 the loss is at most -A c: dual-clip PPO (arXiv 1912.09729, eq. 5).
    """
    loss, is_clipped = clipped_surrogate(
        tokens.ratio, tokens.advantages, low=config.clip_ratio_low, high=config.clip_ratio_high
    )
    metrics = {"actor/pg_clipfrac": is_clipped}
    if config.clip_ratio_c is not None:
        bound = -tokens.advantages * config.clip_ratio_c
        is_clipped_lower = (tokens.advantages < 0) & (loss > bound)
        loss = torch.where(is_clipped_lower, bound, loss)
        metrics["actor/pg_clipfrac_lower"] = is_clipped_lower
    return loss, metrics
