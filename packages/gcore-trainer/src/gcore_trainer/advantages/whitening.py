"""Whitening of advantages over a batch that several processes hold parts of."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.checks import require_finite


def whitening_moments(
    values: Sequence[NDArray[np.floating]], masks: Sequence[NDArray[np.bool_]]
) -> NDArray[np.float64]:
    """Return count, sum and sum of squares of the tokens in the masks, shape [3]; those of parts of a batch add up.

    Raises:
        BatchError: the value of a token in a mask is not finite.
    """
    for i, (v, m) in enumerate(zip(values, masks, strict=True)):
        require_finite(f"values[{i}]", v, m)
    counted = [v[m].astype(np.float64) for v, m in zip(values, masks, strict=True)]
    return np.array([sum(f(v) for v in counted) for f in (np.size, np.sum, lambda v: np.square(v).sum())], np.float64)


def whiten(values: NDArray[np.floating], mask: NDArray[np.bool_], batch: NDArray[np.float64]) -> NDArray[np.float32]:
    """Shift and scale the values of one response to the batch's mean 0 and standard deviation 1; 0 outside the mask.

    (v - mean) / sqrt(var + 1e-8), var with n - 1 in the denominator. A batch of one token is only centred.

    Args:
        values: [R] of one response.
        mask: [R] tokens that count.
        batch: `whitening_moments` of the whole batch.
    """
    count, total, squares = batch.tolist()
    mean = total / max(count, 1.0)
    variance = max(squares - count * mean * mean, 0.0) / (count - 1.0) if count > 1 else 1.0
    return np.where(mask, (values - mean) / np.sqrt(variance + 1e-8), 0.0).astype(np.float32)
