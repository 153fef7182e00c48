"""A response of several turns in pieces, as the run's page shows it: who wrote each, and what it follows."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_rollout import Completion
from gcore_trainer import cut_at_forks


def list_pieces(
    response: Completion,
    decode: Callable[[NDArray[np.int64]], str],
    advantages: NDArray[np.float32] | None,
) -> list[dict[str, Any]]:
    """Return the contiguous runs of tokens that the policy sampled with one version of the weights, or was given.

    Each is a row of JSON: ``text``, ``is_sampled``, ``version`` (-1: given), and ``parent``, the number of the piece
    that it follows; -1: it follows the prompt; -2: it follows nothing. With credit of turns also ``credit`` and, if
    there are ``advantages`` [R], ``advantage``; with agents that are named ``agent``.
    """
    token_ids = response.token_ids
    versions = response.weight_versions
    agents = np.full(token_ids.shape, "", object)
    for agent, spans in response.agents.items():
        for turn_start, turn_stop in spans:
            agents[turn_start:turn_stop] = agent
    changes = np.flatnonzero(np.diff(versions)) + 1
    pieces: list[dict[str, Any]] = []
    # Of each piece, by its last token.
    number_of_last: dict[int, int] = {}
    for span_start, span_stop, followed in cut_at_forks(token_ids.size, response.forks):
        inner = changes[(span_start < changes) & (changes < span_stop)].tolist()
        parent = number_of_last.get(followed, followed)
        for start, stop in pairwise([span_start, *inner, span_stop]):
            piece: dict[str, Any] = {
                "text": decode(token_ids[start:stop]),
                "is_sampled": bool(versions[start] >= 0),
                "parent": parent,
                "version": int(versions[start]),
            }
            if response.credit is not None and piece["is_sampled"]:
                piece["credit"] = float(response.credit[start])
                if advantages is not None:
                    piece["advantage"] = float(advantages[start])
            if agents[start]:
                piece["agent"] = agents[start]
            parent = len(pieces)
            number_of_last[stop - 1] = parent
            pieces.append(piece)
    return pieces
