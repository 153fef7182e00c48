"""GRPO with process supervision: the steps of all responses to a prompt are compared with each other."""

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import ScoredGroup, advantage_estimator
from gcore_trainer.advantages.estimators.grpo import add_turn_advantages


@advantage_estimator(reads_steps=True, min_group_size=2)
def grpo_process(
    group: ScoredGroup, *, norm_adv_by_std_in_grpo: bool = True
) -> list[NDArray[np.floating]]:
    """Return A_it, the sum of the normalised rewards of the step of token t and of those after it.

    The rewards r_ij of all steps j of all responses i are normalised together, (r_ij - mean(r)) / (std(r) + 1e-6), as
    those of responses are by `grpo_advantages`, and A_it is their sum over the steps that end at token t or later:
    DeepSeekMath (arXiv 2402.03300), section 4.1.3.
    """
    advantages = group.at_every_token(np.zeros(len(group.masks)))
    steps: list[tuple[NDArray[np.floating], float]] = []
    for response, turns in zip(advantages, group.turns, strict=False):
        steps.extend((response[:stop], reward) for _, stop, reward, _ in turns)
    add_turn_advantages(steps, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo)
    return advantages
