"""The requests of replicas in waves of sampling; many waves at once, each with replicas of its own.

Shapes: G groups and N responses to each, Q = all of these over W waves.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gcore_placement.simulation.continuous_batching import Requests
from gcore_placement.workload.traces import Wave


def policy_requests(waves: Sequence[Wave], num_replicas: int) -> Requests:
    """Return the responses in order of groups, from second 0: each replica gets an equal run of neighbours.

    So most groups stay together, and on each replica a group's prompt is computed once.
    """
    parts: list[tuple[NDArray[np.float64], ...]] = []
    replicas: list[NDArray[np.intp]] = []
    for number, wave in enumerate(waves):
        num_groups, n = wave.response_length.shape
        index = np.arange(num_groups * n)
        replica = index * num_replicas // len(index)
        prompt = np.repeat(wave.prompt_length, n)
        is_first = (index % n == 0) | (np.diff(replica, prepend=-1) > 0)
        replicas.append(number * num_replicas + replica)
        parts.append((np.where(is_first, prompt, 0.0), prompt, wave.response_length.ravel()))
    prefill, context, length = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Requests(
        replica=np.concatenate(replicas),
        arrival=np.zeros(len(length)),
        prefill=prefill,
        context=context,
        length=length,
    )


def judge_requests(waves: Sequence[Wave], ready_Q: NDArray[np.float64], num_replicas: int) -> Requests:
    """Return the judgements, dealt in turn to a wave's replicas as responses finish; each reads prompt and response."""
    wave_Q = np.repeat(np.arange(len(waves)), [wave.response_length.size for wave in waves])
    read = np.concatenate([(w.prompt_length[:, None] + w.response_length).ravel() for w in waves])
    length = np.concatenate([wave.judge_length.ravel() for wave in waves])
    order = np.lexsort((ready_Q, wave_Q))
    turn = np.arange(len(order)) - wave_starts(waves)[wave_Q]
    return Requests(
        replica=wave_Q * num_replicas + turn % num_replicas,
        arrival=ready_Q[order],
        prefill=read[order],
        context=read[order],
        length=length[order],
    )


def wave_starts(waves: Sequence[Wave]) -> NDArray[np.intp]:
    """Return the index of the first request of each wave: [W]."""
    sizes = np.array([wave.response_length.size for wave in waves])
    return np.cumsum(sizes) - sizes


def context_tokens(requests: Requests) -> NDArray[np.float64]:
    """Return the sum over a request's tokens of the tokens that its sequence holds: [Q]."""
    return requests.context * requests.length + requests.length**2 / 2
