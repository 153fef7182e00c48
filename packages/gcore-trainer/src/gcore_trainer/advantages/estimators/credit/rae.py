"""RAE: turns are compared with a moving average of the returns of their role in their game."""

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import ScoredGroup, advantage_estimator
from gcore_trainer.config import Fraction


@advantage_estimator(reads_turns=True, moves_baselines=True)
def rae(group: ScoredGroup, *, ema_decay: Fraction = 0.95) -> list[NDArray[np.floating]]:
    """Return the scores, for responses without turns; turns have A = R - b as `add_advantages`' ``credits``.

    Role-conditioned advantage estimation (SPIRAL, arXiv 2506.24119): R is the return of a turn, and b a moving average
    over the run, of the mean return R of the turn's role in each episode of its game: b <- decay b + (1 - decay) R,
    from 0 on. So what a role gains by its place in the game, such as that of the first player, is no advantage. As in
    the authors' code b does not contain the R that it is subtracted from; with it A would be ``ema_decay`` times as
    large.
    """
    del ema_decay
    return group.at_every_token(group.scores)
