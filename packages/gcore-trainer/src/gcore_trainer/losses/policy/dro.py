"""DRO: the plain policy gradient, held near the policy before the step by the square of the log-ratio."""

import torch

from gcore_trainer.config import AboveZero, PolicyLossConfig
from gcore_trainer.objectives.policy import PolicyTokens


def dro(
    tokens: PolicyTokens, _config: PolicyLossConfig, *, dro_beta: AboveZero = 0.0
) -> torch.Tensor:
    """Compute -A log_probs + (beta / 2) (log_probs - old_log_probs)^2: DRO (arXiv 2405.19107, eq. 4), token by token.

    ``dro_beta`` has to be given, as in verl: 0 is refused.
    """
    log_ratio = tokens.log_probs - tokens.old_log_probs
    return -tokens.advantages * tokens.log_probs + 0.5 * dro_beta * log_ratio.square()
