"""A measured run's responses once more: their lengths, and which groups had scores that differ."""

from collections.abc import Sequence

import numpy as np

from gcore_llm.simulate.work import group_and_index, sample_name
from gcore_placement.workload.sampled_lengths import SampledLengths, step_lengths
from gcore_rollout import Request


class Replay:
    """By ticket, which is a prompt's place in the order of sampling; behind the last one it begins anew.

    Args:
        steps: what each step sampled, in the run's order.
        num_kept: groups of each step whose scores differed.
        n: responses a prompt.
        sigma: standard deviation of the lengths' logarithm.
        seed: of the order within a step.

    Raises:
        ValueError: no step sampled anything.
    """

    def __init__(
        self, steps: Sequence[SampledLengths], num_kept: Sequence[int], *, n: int, sigma: float, seed: int
    ) -> None:
        random = np.random.default_rng(seed)
        lengths = [random.permutation(step_lengths(step, sigma=sigma)).reshape(-1, n) for step in steps]
        signals = [random.permutation(np.arange(len(own)) < kept) for own, kept in zip(lengths, num_kept, strict=True)]
        self._lengths = np.concatenate(lengths)
        self._signals = np.concatenate(signals)
        if not len(self._lengths):
            raise ValueError("steps have no samples: one or more are needed")
        self._rows: dict[int, int] = {}
        """The row of each group that has been sampled, by the key that samples' names hold."""

    def length(self, request: Request, index: int) -> int:
        """Tokens of one response to a request, whose id is its ticket."""
        row = int(request.request_id) % len(self._lengths)
        self._rows[group_and_index(sample_name(request.seed, index))[0]] = row
        return int(self._lengths[row, index])

    def has_signal(self, group: int) -> bool:
        """Whether the scores of a group differ, of which responses have been sampled; ``group`` is its key."""
        return bool(self._signals[self._rows[group]])
