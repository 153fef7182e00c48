"""Random numbers that depend on their key alone, and on nothing drawn before."""

import math
from statistics import NormalDist

_NORMAL = NormalDist()
_INVERSE = _NORMAL.inv_cdf
_MASK = 0xFFFF_FFFF_FFFF_FFFF


def uniform(*key: int) -> float:
    """Return a number in (0, 1): splitmix64's finaliser (Steele, Lea and Flood, OOPSLA 2014) over the key's hash."""
    x = hash(key) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (((x ^ (x >> 31)) >> 12) + 0.5) * 2.0**-52


def log_normal(u: float, *, median: float, sigma: float) -> float:
    """Return the ``u`` quantile of a log-normal distribution."""
    return median * math.exp(sigma * _INVERSE(u))


def blend(u_shared: float, u_own: float, share: float) -> float:
    """Mix two uniform numbers into one: ``share`` of the variance of its normal quantile comes from the first."""
    return _NORMAL.cdf(math.sqrt(share) * _INVERSE(u_shared) + math.sqrt(1 - share) * _INVERSE(u_own))
