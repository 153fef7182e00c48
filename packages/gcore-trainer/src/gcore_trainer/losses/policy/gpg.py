"""GPG: the plain policy gradient, without ratio and clip."""

import torch

from gcore_trainer.config import PolicyLossConfig
from gcore_trainer.objectives.policy import PolicyTokens


def gpg(tokens: PolicyTokens, _config: PolicyLossConfig) -> torch.Tensor:
    """Compute -A log_probs: GPG (arXiv 2504.02546, eq. 6), and REINFORCE where each step has one update."""
    return -tokens.advantages * tokens.log_probs
