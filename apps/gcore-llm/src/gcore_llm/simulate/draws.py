"""Random numbers that depend on what they are for and on nothing that happened before."""

import math
from statistics import NormalDist

from gcore_llm.simulate.config import LengthConfig

_NORMAL = NormalDist()
_INVERSE = _NORMAL.inv_cdf
_MASK = 0xFFFF_FFFF_FFFF_FFFF


def uniform(*key: int) -> float:
    """In (0, 1), from the key alone: splitmix64's finaliser (Steele, Lea and Flood, OOPSLA 2014) over its hash."""
    x = hash(key) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (((x ^ (x >> 31)) >> 12) + 0.5) * 2.0**-52


def log_normal(u: float, *, median: float, sigma: float) -> float:
    """The value below which a share ``u`` lies."""
    return median * math.exp(sigma * _INVERSE(u))


def length(u: float, config: LengthConfig, *, unit: int) -> int:
    """A length in units of ``unit`` tokens, at least one."""
    return max(1, round(log_normal(u, median=config.median, sigma=config.sigma) / unit))


def blend(u_shared: float, u_own: float, share: float) -> float:
    """Distributed as both are: a share of the normal variance behind it is that of the first, the rest of the other."""
    return _NORMAL.cdf(math.sqrt(share) * _INVERSE(u_shared) + math.sqrt(1 - share) * _INVERSE(u_own))
