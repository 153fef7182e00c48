"""GiGPO: turns that start at the same state are compared with each other, next to their sessions."""

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import ScoredGroup, advantage_estimator
from gcore_trainer.advantages.estimators.grpo import add_turn_advantages, grpo_advantages
from gcore_trainer.config import NotNegative


@advantage_estimator(reads_turns=True, min_group_size=2)
def gigpo(
    group: ScoredGroup,
    *,
    step_advantage_w: NotNegative = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
) -> list[NDArray[np.floating]]:
    """Return A = A_E + w A_S at the tokens of a turn (arXiv 2505.10978, eq. 3 to 8).

    A_E is the `grpo_advantages` of the turn's session, and A_S those of the turn's return among the turns of all
    sessions that start at the same state, 0 if there is no other. Without ``norm_adv_by_std_in_grpo`` neither is
    divided by a standard deviation: verl-agent's ``mean_norm``, whose A_E counts a session once for each of its turns.
    """
    scores = grpo_advantages(group.scores, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo)
    advantages = group.at_every_token(scores)
    states: dict[int, list[tuple[NDArray[np.floating], float]]] = {}
    for response, turns in zip(advantages, group.turns, strict=False):
        for start, stop, value, state in turns:
            states.setdefault(state, []).append((response[start:stop], value))
    for members in states.values():
        if len(members) > 1:
            add_turn_advantages(
                members,
                norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
                weight=step_advantage_w,
            )
    return advantages
