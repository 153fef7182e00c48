"""The process of a contender, which returns the figures of its steps, and the means to take them."""

import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from gcore_bench.grpo.workload import MODEL, WORKLOADS, Task
from gcore_bench.harness.processes import Spec
from gcore_rollout import RewardFunction, Scored

Step = dict[str, Any]
"""Figures of one step, from the end of the previous one to its own end.

- ``wall_s``, and ``cpu_s`` of all threads; None for a contender of several processes.
- ``gen_s``: generation, including tokenizing, detokenizing and the transfer of new weights to the engine.
- ``reward_s``: time inside the reward function; ``train_s``: forward, backward and optimizer.
- ``score``: mean over all completions.
- ``num_samples``, ``mean_length`` and ``max_length``: completions, and their tokens, end of sequence included.
- ``lengths``: of each completion; empty if a contender reports no more than mean and maximum.
"""


def step_figures(lengths: Sequence[int], **figures: float) -> Step:
    """Return the figures of a step whose completions have these lengths."""
    sizes = {"num_samples": len(lengths), "mean_length": fmean(lengths), "max_length": max(lengths)}
    return {"reward_s": 0.0, "score": 0.0, **sizes, "lengths": lengths, **figures}


def run(spec: Spec) -> list[Step]:
    """Make the steps of a contender, or the model that the workload trains; return the figures of every step."""
    own: dict[str, Any] = {**spec.options, "model": Path(spec.options["model"]), "threads": spec.threads}
    task = Task(workload=WORKLOADS[spec.part], contender=spec.contender, **own)
    name = "setup" if spec.contender == MODEL else f"contenders.{spec.contender.removesuffix('-vllm')}"
    return import_module(f"gcore_bench.grpo.{name}").run(task)


class StepClock:
    """Measures wall and CPU seconds between one call of `lap` and the next."""

    def __init__(self) -> None:
        self._last = time.perf_counter(), time.process_time()

    def lap(self) -> tuple[float, float]:
        """Return wall and CPU seconds since the last call."""
        (wall_s, cpu_s), self._last = self._last, (time.perf_counter(), time.process_time())
        return self._last[0] - wall_s, self._last[1] - cpu_s


class StepRecorder:
    """Collects the figures of every step of a contender that runs in one process, and calls its reward function."""

    def __init__(self, reward: RewardFunction) -> None:
        self.steps: list[Step] = []
        self.clock = StepClock()
        self._reward = reward
        self._reward_s = 0.0
        self._scores: list[float] = []

    def score(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Call the reward function, and note the seconds inside it and its score."""
        start_s = time.perf_counter()
        value = cast("Any", self._reward(prompt, completion, row))
        self._reward_s += time.perf_counter() - start_s
        self._scores.append(float(value.score if isinstance(value, Scored) else value))
        return self._scores[-1]

    def ended(self, lengths: Sequence[int], *, gen_s: float, train_s: float, has_reward_in_gen: bool = False) -> None:
        """Record a step, from the end of the previous one until now."""
        wall_s, cpu_s = self.clock.lap()
        reward_s, score = self._reward_s, sum(self._scores) / max(len(self._scores), 1)
        self._reward_s, self._scores = 0.0, []
        gen_s -= reward_s if has_reward_in_gen else 0.0
        seconds = {"wall_s": wall_s, "cpu_s": cpu_s, "gen_s": gen_s, "reward_s": reward_s, "train_s": train_s}
        self.steps.append(step_figures(lengths, **seconds, score=score))
