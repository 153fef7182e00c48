"""GSPO: PPO's clip of a sequence's ratio, the geometric mean of its tokens' ratios."""

import torch

from gcore_trainer.config import PolicyLossConfig
from gcore_trainer.objectives.policy import LossAndMetrics, PolicyTokens, clipped_surrogate

_MAX_LOG_RATIO = 10.0
"""A sequence's log-ratio is clamped to this much from above only, as in verl."""


def gspo(tokens: PolicyTokens, config: PolicyLossConfig) -> LossAndMetrics:
    """Compute the `clipped_surrogate` of sequences' ratios.

    s_i = exp(mean_t(log_probs - old_log_probs)), and at token t the ratio is sg[s_i] pi / sg[pi], whose value is s_i
    and whose gradient is the token's own: GSPO-token (arXiv 2507.18071, section 4.3); with one advantage for all tokens
    of a sequence and ``seq-mean-token-mean`` it is GSPO.
    """
    log_probs = tokens.log_probs
    means = tokens.sequence_means((log_probs - tokens.old_log_probs).detach())
    ratio = torch.exp((means + (log_probs - log_probs.detach())).clamp(max=_MAX_LOG_RATIO))
    loss, is_clipped = clipped_surrogate(
        ratio, tokens.advantages, low=config.clip_ratio_low, high=config.clip_ratio_high
    )
    return loss, {"actor/pg_clipfrac": is_clipped}
