"""CRD, centered reward distillation: what the policy implies of an image's reward is to be its reward."""

from gcore_trainer.config import AboveZero
from gcore_trainer.diffusion.losses import ForwardPass, forward_loss
from gcore_trainer.objectives.policy import LossAndMetrics


@forward_loss(needs_old=True, samples_by_old=False, groups="own_noise")
def crd(forward: ForwardPass, *, beta: AboveZero = 1.0) -> LossAndMetrics:
    """Compute adv_clip_max / beta mean_i (beta (g_i - mean g) - (R_i - mean R))^2 of each group (arXiv 2603.14128).

    g = |v_old - (e - x_0)|^2 - |v - (e - x_0)|^2 stands for log p - log p_old of the image, and R in [0, 1] for its
    reward: 1 with an advantage of adv_clip_max, 0 with minus that. Under the policy that maximises the reward with a KL
    penalty, beta g is R up to a constant of the prompt, which the means over its images take out. The images are the
    policy's own, and the old policy, an average of it, is apart from them. Scale and bounds of R are those of
    Flow-Factory's implementation with uniform weights, without its self-normalised errors.
    """
    gains = forward.by_group(forward.errors(forward.old) - forward.errors(forward.policy))
    gaps = beta * gains - forward.by_group(forward.optimality)
    return forward.adv_clip_max / beta * gaps.var(1, correction=0), {}
