"""FlashREINFORCE: every response is compared with the mean of its batch."""

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import ScoredGroup, advantage_estimator


@advantage_estimator(centers_batch=True)
def flash_reinforce(group: ScoredGroup) -> list[NDArray[np.floating]]:
    """Return R at every token, from which the mean of R over the responses of the batch is subtracted afterwards.

    A = R - mean(R), without a division, so that one response to each prompt is enough (OpenRLHF, pull request 1339).
    FlashREINFORCE also has importance weights of tokens, the loss aggregation ``seq-mean-token-mean``, and leaves out
    responses by the mean of DPPO's divergence (arXiv 2602.04879), which is the ``rollout_rs`` ``seq_mean_kl``.
    """
    return group.at_every_token(group.scores)
