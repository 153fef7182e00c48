"""SAPO: a smooth gate in the place of the clip, so that a token weighs less the further its ratio is from 1."""

import torch

from gcore_trainer.config import AboveZero, PolicyLossConfig
from gcore_trainer.objectives.policy import PolicyTokens


def sapo(
    tokens: PolicyTokens,
    _config: PolicyLossConfig,
    *,
    tau_pos: AboveZero = 1.0,
    tau_neg: AboveZero = 1.05,
) -> torch.Tensor:
    """Compute -A (4 / tau) sigmoid(tau (r - 1)), tau = ``tau_pos`` if A > 0, else ``tau_neg`` (arXiv 2511.20347)."""
    ratio = tokens.ratio
    advantages = tokens.advantages
    tau = torch.where(
        advantages > 0, torch.full_like(ratio, tau_pos), torch.full_like(ratio, tau_neg)
    )
    return -advantages * torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
