"""Patterns that the tokens of samples repeat at their end.

Shapes: B samples, T tokens, P pattern sizes 1..P.
"""

import numpy as np
from numpy.typing import NDArray


def runs_at_end(tokens_T: NDArray[np.int64], num_sizes: int) -> NDArray[np.int64]:
    """Count, for each pattern size p, how many of the last tokens in a row equal the one p before; shape [P]."""
    runs_P = np.zeros(num_sizes, np.int64)
    for size in range(1, min(num_sizes, len(tokens_T) - 1) + 1):
        differs = np.flatnonzero(tokens_T[:-size] != tokens_T[size:])
        runs_P[size - 1] = len(tokens_T) - size - 1 - differs.max(initial=-1)
    return runs_P


def extend_runs(
    runs_BP: NDArray[np.int64], tokens_BT: NDArray[np.int64], last_B: NDArray[np.int64]
) -> None:
    """Update `runs_at_end` in place, after a token was written at column ``last_B`` of each row."""
    before_BP = last_B[:, None] - np.arange(1, runs_BP.shape[1] + 1)
    earlier_BP = np.take_along_axis(tokens_BT, np.maximum(before_BP, 0), axis=1)
    newest_B1 = np.take_along_axis(tokens_BT, last_B[:, None], axis=1)
    runs_BP[:] = np.where((before_BP >= 0) & (earlier_BP == newest_B1), runs_BP + 1, 0)


def is_repetitive(
    runs_BP: NDArray[np.int64],
    min_size_B: NDArray[np.int64],
    max_size_B: NDArray[np.int64],
    count_B: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Return whether each row ends in ``count_B`` times a pattern of a size within its bounds; never for bounds of 0.

    The last tokens are c times one pattern of p tokens if and only if the last p (c - 1) tokens each equal the one p
    before them. So it is enough to count, for every p, for how many tokens in a row that has held.
    """
    sizes_P = np.arange(1, runs_BP.shape[1] + 1)
    in_bounds_BP = (sizes_P >= min_size_B[:, None]) & (sizes_P <= max_size_B[:, None])
    return (in_bounds_BP & (runs_BP >= sizes_P * (count_B[:, None] - 1))).any(axis=1)
