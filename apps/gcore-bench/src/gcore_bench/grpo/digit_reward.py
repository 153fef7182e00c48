"""A reward that costs next to nothing and differs between almost any two answers."""

from collections.abc import Mapping
from typing import Any

_EVEN = frozenset("02468")


def share_of_even_digits(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """How much of a completion is even digits, from 0 to 1."""
    del prompt, row
    return sum(c in _EVEN for c in completion) / max(len(completion), 1)
