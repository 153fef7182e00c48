"""What a contender's process notes about its steps."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from gcore_rollout import RewardFunction


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """One step, from the end of the one before to its own end."""

    wall_s: float
    cpu_s: float | None
    """Of all threads; None where a contender computes in several processes."""
    gen_s: float
    """Generation, with tokenizing, detokenizing and the transfer of new weights to the engine."""
    reward_s: float
    """Inside the reward function."""
    train_s: float
    """Forward, backward and optimizer."""
    score: float
    """Mean of all completions."""
    num_samples: int
    mean_length: float
    """Of all completions, in tokens, end of sequence included."""
    max_length: int
    lengths: tuple[int, ...] = ()
    """Of each; empty where a contender tells only the above."""

    @classmethod
    def of(cls, lengths: Sequence[int], **figures: float) -> Self:
        """A step whose completions have these lengths, and its other figures."""
        return cls(
            num_samples=len(lengths),
            mean_length=fmean(lengths),
            max_length=max(lengths),
            lengths=tuple(lengths),
            **figures,
        )

    @property
    def other_s(self) -> float:
        """Advantages, batches, bookkeeping."""
        return self.wall_s - self.gen_s - self.reward_s - self.train_s


class StepClock:
    """Wall and CPU seconds between one call of `lap` and the next."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = self._now()

    def lap(self) -> tuple[float, float]:
        before_wall_s, before_cpu_s = self._wall_s, self._cpu_s
        self._wall_s, self._cpu_s = self._now()
        return self._wall_s - before_wall_s, self._cpu_s - before_cpu_s

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


class TimedReward:
    """A reward that notes the seconds spent inside it and the scores it gave."""

    def __init__(self, reward: "RewardFunction") -> None:
        self._reward = reward
        self._seconds = 0.0
        self._scores: list[float] = []

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        start_s = time.perf_counter()
        value = self._reward(prompt, completion, row)
        self._seconds += time.perf_counter() - start_s
        assert isinstance(value, float)
        self._scores.append(value)
        return value

    def drain(self) -> tuple[float, float]:
        """Seconds and mean score since the last call."""
        seconds, scores = self._seconds, self._scores
        self._seconds, self._scores = 0.0, []
        return seconds, sum(scores) / max(len(scores), 1)
