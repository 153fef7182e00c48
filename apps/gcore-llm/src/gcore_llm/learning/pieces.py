"""A response of several turns in pieces, as the run's page shows it: who wrote each, and what it follows."""

from itertools import pairwise
from typing import Any

import numpy as np

from gcore_rollout import Completion


def list_pieces(response: Completion, tokenizer: Any) -> list[dict[str, Any]]:
    """Return the contiguous runs of tokens that the policy sampled with one version of the weights, or was given.

    Each is a row of JSON: ``text``, ``is_sampled``, ``version`` (-1: given), and ``parent``, the number of the piece
    that it follows; -1: it follows the prompt; -2: it follows nothing. With credit of turns also ``credit``.
    """
    token_ids = response.token_ids
    versions = response.weight_versions
    parents = np.arange(token_ids.size) - 1
    is_start = np.ones(token_ids.size + 1, np.bool_)
    is_start[1:-1] = versions[1:] != versions[:-1]
    if response.forks is not None:
        places, followed = response.forks.T
        parents[places] = followed
        is_start[places] = True
        is_start[followed[followed >= 0] + 1] = True
    numbers = np.cumsum(is_start) - 1
    starts = np.flatnonzero(is_start)
    pieces: list[dict[str, Any]] = []
    for start, end in pairwise(starts):
        parent = int(parents[start])
        piece: dict[str, Any] = {
            "text": tokenizer.decode(token_ids[start:end]),
            "is_sampled": bool(versions[start] >= 0),
            "parent": int(numbers[parent]) if parent >= 0 else parent,
            "version": int(versions[start]),
        }
        if response.credit is not None and piece["is_sampled"]:
            piece["credit"] = float(response.credit[start])
        pieces.append(piece)
    return pieces
