"""The responses of a measured run, for a simulation: their lengths, and the groups whose scores differ."""

from collections.abc import Sequence

import numpy as np

from gcore_llm.simulate.work import group_and_index, sample_name
from gcore_placement import SampledLengths, step_lengths
from gcore_rollout import Request


class Replay:
    """Responses by prompt index, which is a prompt's place in the order of sampling; after the last it starts again.

    Args:
        steps: the responses that each step sampled, in the run's order.
        num_kept: groups of each step whose scores differed.
        n: responses to a prompt.
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
            raise ValueError("steps have 0 samples; expected at least one")
        self._rows: dict[int, int] = {}
        """The row of each group that has been sampled, by the key that samples' names hold."""

    def length(self, request: Request, index: int) -> int:
        """Return the tokens of one response to a request, whose id is its prompt index."""
        row = int(request.request_id) % len(self._lengths)
        self._rows[group_and_index(sample_name(request.seed, index))[0]] = row
        return int(self._lengths[row, index])

    def has_signal(self, group: int) -> bool:
        """Return whether the scores of a group differ; ``group`` is the key of one whose responses were sampled."""
        return bool(self._signals[self._rows[group]])
