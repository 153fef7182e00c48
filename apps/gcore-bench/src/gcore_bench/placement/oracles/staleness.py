"""The staleness of responses that are sampled without a pause, in closed form."""

import numpy as np
from numpy.typing import NDArray

from gcore_placement import Lengths


def staleness_shares(lengths: Lengths, *, in_flight: float, batch: float) -> NDArray[np.float64]:
    """Return the shares of responses that are 0, 1, 2, ... versions of the weights old when they are trained on.

    Age is that of a response's first token; a response that new weights interrupt continues with them (partial
    rollout). With K responses ``in_flight``, all of which get tokens at the same rate, and a version for each ``batch``
    of B that are done, the mean response takes K / B versions (Little's law), and one of L tokens x = L / E[L] * K / B.
    As it starts at any phase of a version, it meets floor(x) new ones with probability 1 - (x mod 1), else one more:
    the share of j is E[max(0, 1 - |x - j|)], and the mean K / B.
    """
    versions = lengths.values / lengths.mean * in_flight / batch
    ages = np.arange(int(np.floor(versions[-1])) + 2)
    met = np.maximum(0.0, 1 - np.abs(versions - ages[:, None]))
    return met @ np.diff(lengths.edges)
