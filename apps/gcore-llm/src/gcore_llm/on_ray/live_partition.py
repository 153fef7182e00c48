"""Which of a run's engines generate and which judge, decided after every step by what they did in it."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from gcore_controller import Span
from gcore_llm.on_ray.room import Sizes
from gcore_placement import DynamicPartition, DynamicPartitionConfig, PartitionSpace, RoleLimits, RoleLoad

_SLACK = 0.1
"""A role that waited for less than this share of its time was not held up."""


class PartitionMovedError(Exception):
    """Engines are to change their role, and the run is to go on with that."""


class LivePartition:
    """A dynamic partition of engines, which is told what each did and moves them one by one, or more after a jump.

    Every controller keeps an engine of the policy, and a judge is always there.

    Attributes:
        whole: The sizes, with the engines as they are divided at first.
    """

    def __init__(self, whole: Sizes, *, horizon_steps: int) -> None:
        self.whole = whole
        space = PartitionSpace(
            num_devices=whole.engines + whole.judges,
            policy=RoleLimits(devices_per_replica=1, min_replicas=whole.controllers),
            reward=RoleLimits(devices_per_replica=1),
        )
        config = DynamicPartitionConfig(horizon_steps=horizon_steps)
        self._dynamic = DynamicPartition(space, space.nearest(whole.engines), config)
        self._moved_at_s: float | None = None

    @property
    def sizes(self) -> Sizes:
        """With the engines as they are to be divided."""
        partition = self._dynamic.partition
        return replace(self.whole, engines=partition.policy_replicas, judges=partition.reward_replicas)

    def observe(self, step_s: float, devices: Mapping[str, Sequence[Span]]) -> None:
        """Take in a step, and when each device worked in it."""
        now_s = time.monotonic()
        if self._moved_at_s is not None:
            # From the decision to the end of the first step after it.
            move_s = max(0.0, now_s - self._moved_at_s - step_s)
            self._dynamic.config = replace(self._dynamic.config, move_s=move_s)
            self._moved_at_s = None
        engines = _intervals(devices, "engine", "gen")
        judges = _intervals(devices, "judge", "reward")
        if not engines or not judges:
            return
        start_s = min(start for start, _ in engines)
        policy_s, reward_s = (max(stop for _, stop in role) - start_s for role in (engines, judges))
        # The judge is done soon after the last response, however many replicas it has, or it is what is waited for.
        policy = _load(engines, policy_s, was_waiting=policy_s - _covered(engines) > _SLACK * policy_s)
        reward = _load(judges, reward_s, was_waiting=reward_s - policy_s < _SLACK * policy_s)
        before = self._dynamic.partition
        if self._dynamic.observe(policy, reward) != before:
            self._moved_at_s = now_s


def _intervals(devices: Mapping[str, Sequence[Span]], role: str, stage: str) -> list[tuple[float, float]]:
    """When devices of a role were in a stage."""
    return [
        (span.start_s, span.end_s)
        for name, spans in devices.items()
        if name.startswith(f"{role} ")
        for span in spans
        if span.stage == stage
    ]


def _load(intervals: Iterable[tuple[float, float]], finish_s: float, *, was_waiting: bool) -> RoleLoad:
    busy_s = sum(stop - start for start, stop in intervals)
    return RoleLoad(work_device_s=busy_s, busy_device_s=busy_s, finish_s=finish_s, was_waiting=was_waiting)


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of them was under way."""
    total_s, end_s = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total_s += max(0.0, stop - max(start, end_s))
        end_s = max(end_s, stop)
    return total_s
