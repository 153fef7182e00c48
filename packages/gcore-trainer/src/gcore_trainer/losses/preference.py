"""Losses of pairs of a chosen and a rejected response.

Shapes: P pairs.
"""

from dataclasses import dataclass
from typing import assert_never

import torch
from torch.nn.functional import logsigmoid

from gcore_trainer.config import DPOLossType
from gcore_trainer.errors import BatchError, ConfigError


@dataclass(frozen=True, kw_only=True)
class DPOLoss:
    """Loss of every pair, with the rewards that the policy implies. All shape [P]."""

    loss: torch.Tensor
    chosen_rewards: torch.Tensor
    """beta (log pi - log pi_ref) of the chosen response, without gradient."""
    rejected_rewards: torch.Tensor


def dpo_loss(
    policy_chosen: torch.Tensor,
    policy_rejected: torch.Tensor,
    ref_chosen: torch.Tensor,
    ref_rejected: torch.Tensor,
    *,
    beta: float,
    loss_type: DPOLossType = "sigmoid",
    label_smoothing: float = 0.0,
) -> DPOLoss:
    """Compute the loss of direct preference optimisation, per pair.

    With h = (log pi - log pi_ref)(chosen) - (log pi - log pi_ref)(rejected):

    - ``sigmoid``: -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h); s = 0 is DPO (arXiv 2305.18290, eq. 7), and
      s > 0 its conservative form for labels of which a share s is wrong (E. Mitchell, "A note on DPO with noisy
      preferences", 2023)
    - ``ipo``: (h - 1 / (2 beta))^2, IPO (arXiv 2310.12036, eq. 17)
    - ``hinge``: max(0, 1 - beta h), SLiC's loss on DPO's rewards (arXiv 2305.10425, arXiv 2309.06657)

    Args:
        policy_chosen: [P] log-probabilities of the responses under the policy, with their gradient: the sum over a
            response's tokens in ``sigmoid`` and ``hinge``, but the mean over them in ``ipo``, whose target would
            otherwise mean another thing for every length.
        policy_rejected: [P], likewise.
        ref_chosen: [P] under the reference policy, likewise.
        ref_rejected: [P], likewise.
        label_smoothing: s, in [0, 0.5); 0 for any other loss than ``sigmoid``.

    Raises:
        ConfigError: a label_smoothing out of its bounds.
        BatchError: shapes that differ.
    """
    if not 0 <= label_smoothing < 0.5 or (label_smoothing and loss_type != "sigmoid"):
        raise ConfigError(
            f"label_smoothing is {label_smoothing}; expected a number in [0, 0.5), and 0 unless loss_type is sigmoid "
            f"(loss_type is {loss_type!r})"
        )
    _require_one_shape(
        policy_chosen=policy_chosen, policy_rejected=policy_rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected
    )
    chosen = policy_chosen - ref_chosen
    rejected = policy_rejected - ref_rejected
    h = chosen - rejected
    match loss_type:
        case "sigmoid":
            loss = -(1 - label_smoothing) * logsigmoid(beta * h) - label_smoothing * logsigmoid(-beta * h)
        case "ipo":
            loss = (h - 1 / (2 * beta)).square()
        case "hinge":
            loss = (1 - beta * h).relu()
        case _:
            assert_never(loss_type)
    return DPOLoss(loss=loss, chosen_rewards=beta * chosen.detach(), rejected_rewards=beta * rejected.detach())


def bradley_terry_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    *,
    margin: torch.Tensor | None = None,
    center_coefficient: float = 0.0,
) -> torch.Tensor:
    """Compute a reward model's loss of every pair, shape [P].

    -log sigmoid(r_chosen - r_rejected - margin) + center_coefficient (r_chosen + r_rejected)^2: arXiv 2203.02155,
    eq. 1; the margin is Llama 2's (arXiv 2307.09288, eq. 2). A comparison leaves the rewards' origin open; the last
    term keeps it near 0 (arXiv 2312.09244).

    Args:
        chosen: [P] rewards of the chosen responses, with their gradient.
        rejected: [P] rewards of the rejected ones.
        margin: [P], how much better the chosen one was found. None: 0.

    Raises:
        BatchError: shapes that differ.
    """
    difference = chosen - rejected
    if margin is None:
        _require_one_shape(chosen=chosen, rejected=rejected)
    else:
        _require_one_shape(chosen=chosen, rejected=rejected, margin=margin)
        difference = difference - margin
    return -logsigmoid(difference) + center_coefficient * (chosen + rejected).square()


def _require_one_shape(**tensors: torch.Tensor) -> None:
    """Refuse shapes [P] and [P, 1], which would broadcast to [P, P] pairs."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) != 1:
        raise BatchError(f"shapes are {shapes}; expected equal shapes of one dimension")
