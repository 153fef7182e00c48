"""ECHO: next to the policy loss, the policy learns to predict what its environment answers."""

import torch

from gcore_trainer.config import NotNegative


def echo(
    log_probs: torch.Tensor, weights: torch.Tensor, *, echo_coef: NotNegative = 0.0
) -> torch.Tensor:
    """Return ``echo_coef`` times the cross-entropy of the environment's tokens, -sum_t w_t log p(x_t).

    It is added to any policy loss: ECHO (arXiv 2605.24517, eq. 1 and 3), where w_t is 1 / (sequences x environment
    tokens of the sequence) and the coefficient 0.05; from 0.1 on it harmed the policy there.

    Args:
        log_probs: [N] of the environment's tokens, 0 at others, under the policy and its temperature.
        weights: [N], 0 at tokens that are not the environment's.
    """
    return -echo_coef * (weights * log_probs).sum()
