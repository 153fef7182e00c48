"""Diffusion-DPO: of two images of a prompt the policy is to prefer the better one."""

from torch.nn.functional import logsigmoid

from gcore_trainer.config import AboveZero
from gcore_trainer.diffusion.losses import ForwardPass, forward_loss
from gcore_trainer.objectives.policy import LossAndMetrics


@forward_loss(needs_reference=True, groups="pairs")
def dpo(forward: ForwardPass, *, beta: AboveZero = 2000.0) -> LossAndMetrics:
    """Compute -log sigmoid(-beta / 2 ((e_w - e_ref,w) - (e_l - e_ref,l))) of each pair (arXiv 2311.12908, eq. 14).

    e are mean squared errors of the policy and the reference, with the same noise: of the chosen image w, which is the
    first of a pair, and the rejected one l. A larger ``beta`` keeps the policy closer to the reference.
    """
    changes = forward.by_group(forward.errors(forward.policy) - forward.errors(forward.reference))
    margins = -0.5 * beta * (changes[:, 0] - changes[:, 1])
    return -logsigmoid(margins), {"actor/dpo_accuracy": margins > 0}
