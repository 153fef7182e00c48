"""DGPO, direct group preference optimization: of a prompt's images the good ones are preferred to the bad ones."""

from torch.nn.functional import logsigmoid

from gcore_trainer.config import AboveZero
from gcore_trainer.diffusion.losses import ForwardPass, forward_loss
from gcore_trainer.objectives.policy import LossAndMetrics


@forward_loss(needs_reference=True, groups="shared_noise")
def dgpo(forward: ForwardPass, *, beta: AboveZero = 100.0) -> LossAndMetrics:
    """Compute -log sigmoid(-beta sum_i A_i (e_i - e_ref,i) / n) / beta of each group of n images (arXiv 2510.08425).

    That is the paper's eq. 17 with its weights |A| (eq. 14), which add up to the same for the images with A > 0 as for
    the others; the noise is the same for all images of a group. Divided by beta its gradient is that of the published
    code, sigmoid(beta sum_j A_j (e_j - e_ref,j) / n) sum_i A_i grad e_i / n. The paper draws no low levels
    (``min_level``), where it would learn the faults of images that were made in few steps.
    """
    changes = forward.errors(forward.policy) - forward.errors(forward.reference)
    preferences = forward.by_group(forward.advantages * changes).mean(1)
    return -logsigmoid(-beta * preferences) / beta, {}
