"""The tokens that top-k and top-p keep. Shapes: B samples, V vocabulary, K kept tokens of all samples."""

import numpy as np
import torch
from numpy.typing import NDArray


def list_kept(log_probs_BV: torch.Tensor) -> list[NDArray[np.int32]]:
    """Return the tokens of each row that are not at -inf; none of a row that has all."""
    is_kept_BV = log_probs_BV > -torch.inf
    is_kept_BV &= ~is_kept_BV.all(-1, keepdim=True)
    ids_K = is_kept_BV.nonzero()[:, 1].int().cpu().numpy()
    return np.split(ids_K, is_kept_BV.sum(-1).cumsum(0)[:-1].cpu().numpy())
