"""JSON of agents and of the policy, neither of whom is trusted: strict constants, and bounded depth."""

import json
from typing import Any, NoReturn


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


STRICT_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
"""Refuses NaN and infinite numbers, which Python's own decoder takes."""


def is_deeper(value: Any, depth: int) -> bool:
    """Return whether lists and objects of JSON are nested more than so many levels deep; a flat list is one level."""
    level: list[Any] = [value]
    for _ in range(depth):
        deeper: list[Any] = []
        for entry in level:
            if isinstance(entry, dict):
                deeper.extend(entry.values())
            elif isinstance(entry, list):
                deeper.extend(entry)
        if not deeper:
            return False
        level = deeper
    return any(isinstance(entry, dict | list) for entry in level)
