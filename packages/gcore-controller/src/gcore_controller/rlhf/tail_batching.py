"""Tail batching (RollPacker, arXiv 2509.21009, section 4.1): long responses are sampled together, in a few long steps.

A short step samples more prompts than it needs, up to a length. A prompt of which a sample reaches it is deferred, and
sampled again once as many are deferred as a step needs: in a long step, without that length. What is deferred depends
on lengths alone, and not on time, so that it is the same for any number of controllers and engines, and when resumed.
"""

import math
from collections.abc import Sequence

from gcore_controller.trainer_group import State

_NUM_SHORT_WAVES = 2
"""Most waves of a short step before deferred prompts make up for what is missing, if no groups are filtered."""
_GAIN = 0.5
"""By how much the length of short steps follows the share of prompts that it defers."""


class TailBatching:
    """Chooses the prompts and the length of each wave, and keeps those that are to be sampled again.

    Args:
        quota: groups of a step.
        over_sample_rate: further prompts of a short step, as a share of those that it needs, above 0.
        max_length: length of short steps; 0: half of the further prompts shall be deferred. The length is then a
            quantile of those of the first step, and follows the share that it defers.
        max_waves: most waves of a step with dynamic sampling; None: without.
    """

    def __init__(
        self,
        *,
        quota: int,
        over_sample_rate: float,
        max_length: int = 0,
        max_waves: int | None = None,
    ) -> None:
        self._quota = quota
        self._rate = over_sample_rate
        self._is_fixed = max_length > 0
        self._length: float | None = max_length or None
        self._target = over_sample_rate / 2 / (1 + over_sample_rate)
        self.max_waves = (max_waves or _NUM_SHORT_WAVES) + 1
        """Most waves of a step. The last one of a short step takes deferred prompts, without a length."""
        self._deferred: list[int] = []
        self._again: list[int] = []
        """Prompts of complete groups that a step had no use for."""
        self._is_long = False
        self._num_waves = 0
        self._num_deferred = 0
        self._wave_size = 0
        self._wave_length: int | None = None
        """The number of prompts of the last wave, and the length at which a sample defers its prompt."""

    def start(self) -> None:
        """Start a step, which is long if there is a batch of deferred prompts."""
        self._is_long = len(self._deferred) >= self._quota
        self._num_waves = 0
        self._num_deferred = 0

    def next_wave(self, count: int) -> tuple[list[int], int, int | None]:
        """Choose the prompts of the next wave, from which ``count`` groups are needed.

        Returns the indices of prompts that were drawn before, the number of prompts to draw, and the length at which a
        sample defers its prompt; None: at none.
        """
        self._num_waves += 1
        is_unlimited = self._is_long or self._num_waves == self.max_waves
        queue = self._deferred if is_unlimited else self._again
        if is_unlimited or self._length is None:
            self._wave_size = count
            self._wave_length = None
        else:
            self._wave_size = math.ceil(count * (1 + self._rate))
            self._wave_length = round(self._length)
        again = queue[: self._wave_size]
        del queue[: self._wave_size]
        return again, self._wave_size - len(again), self._wave_length

    def record_wave(self, deferred: Sequence[int], longest: Sequence[int]) -> None:
        """Record the last wave over all controllers: deferred prompts, and the longest sample of each group."""
        self._deferred = sorted([*self._deferred, *deferred])
        self._num_deferred += len(deferred)
        if self._length is None:
            if longest:
                self._length = float(
                    sorted(longest)[math.ceil((1 - self._target) * len(longest)) - 1]
                )
        elif self._wave_length is not None and not self._is_fixed:
            share = len(deferred) / self._wave_size
            self._length = max(1.0, self._length * math.exp(_GAIN * (share - self._target)))

    def finish(self, surplus: Sequence[int]) -> None:
        """End a step; ``surplus`` are complete groups, over all controllers, that it has no use for."""
        if self._is_long:
            self._deferred = sorted([*self._deferred, *surplus])
        else:
            self._again = sorted([*self._again, *surplus])

    def metrics(self) -> dict[str, float]:
        """Return metrics of the step that has ended."""
        return {
            "sampling/long_round": float(self._is_long),
            "sampling/deferred_groups": float(self._num_deferred),
            "sampling/queued_groups": float(len(self._deferred) + len(self._again)),
            "sampling/short_length": self._length or 0.0,
        }

    def state(self) -> State:
        """Return what a checkpoint holds between two steps; the same on every controller."""
        return {
            "length": self._length,
            "deferred": list(self._deferred),
            "again": list(self._again),
        }

    def load_state(self, state: State) -> None:
        """Restore `state`."""
        self._length = state["length"]
        self._deferred = list(state["deferred"])
        self._again = list(state["again"])
