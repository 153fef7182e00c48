"""CISPO: REINFORCE weighted by a clipped ratio without gradient, so that every token keeps a gradient."""

from gcore_trainer.config import PolicyLossConfig
from gcore_trainer.objectives.policy import LossAndMetrics, PolicyTokens


def cispo(tokens: PolicyTokens, config: PolicyLossConfig) -> LossAndMetrics:
    """Compute -sg[clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)] A log_probs.

    CISPO of MiniMax-M1 (arXiv 2506.13585, eq. 4 and 5). The paper has no lower clip: ``clip_ratio_low`` 1.
    """
    ratio = tokens.ratio
    weight = ratio.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high).detach()
    loss = -weight * tokens.advantages * tokens.log_probs
    return loss, {"actor/pg_clipfrac": weight != ratio}
