"""A reward that takes almost no time and differs between almost any two answers."""

from collections.abc import Mapping
from typing import Any

_EVEN = frozenset("02468")


def share_of_even_digits(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Return the fraction of a completion's characters that are even digits."""
    del prompt, row
    return sum(c in _EVEN for c in completion) / max(len(completion), 1)
