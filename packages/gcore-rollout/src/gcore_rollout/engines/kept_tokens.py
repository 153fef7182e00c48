"""The tokens that top-k and top-p keep. Shapes: B samples, V vocabulary, K kept tokens of all samples."""

import numpy as np
import torch
from numpy.typing import NDArray


def kept_tokens(log_probs_BV: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return how many tokens are not at -inf in each row, [B], and these, [K]; 0 and none in a row that has all."""
    is_kept_BV = log_probs_BV > -torch.inf
    is_kept_BV &= ~is_kept_BV.all(-1, keepdim=True)
    counts_B = is_kept_BV.sum(-1).cpu().numpy()
    ids_K = is_kept_BV.nonzero()[:, 1].int().cpu().numpy()
    return counts_B, ids_K
