"""Estimates of a policy's divergence from a reference."""

from typing import assert_never

import torch

from gcore_trainer.advantages.reward_shaping import MAX_K3
from gcore_trainer.config import KLPenalty


def kl_penalty(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: KLPenalty) -> torch.Tensor:
    """Estimate KL(policy || reference) at every token, shape [N] (J. Schulman, "Approximating KL divergence", 2020).

    k1: log p - log q;  k2: (log p - log q)^2 / 2;  k3: q/p - 1 - log(q/p), GRPO's (arXiv 2402.03300, eq. 4), at most
    10 as in verl: a token at the bound has no gradient.

    k1 and, below its bound, k3 estimate the divergence without bias, but their gradients do not estimate its gradient
    (k1's is zero in expectation); k2's does, under the policy's own samples (arXiv 2510.01555). k1+ and k3+ have the
    value of k1 and k3 and the gradient of k2.
    """
    log_ratio = log_probs - ref_log_probs
    match kind:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            negative = (-log_ratio).clamp(-20.0, 20.0)
            return (negative.exp() - 1 - negative).clamp(max=MAX_K3)
        case "k1+" | "k3+":
            value = kl_penalty(log_probs.detach(), ref_log_probs, "k1" if kind == "k1+" else "k3")
            return value + log_ratio.square() / 2 - (log_ratio.square() / 2).detach()
        case _:
            assert_never(kind)
