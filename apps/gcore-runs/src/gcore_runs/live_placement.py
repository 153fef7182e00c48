"""The placement of a run's engines, which follows their measured load from wave to wave, over resumptions, too."""

import json
import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gcore_controller import DeviceWork, Round, Sizes, Span
from gcore_placement import (
    STRATEGIES,
    DynamicPartition,
    DynamicPartitionConfig,
    PartitionSpace,
    RoleLimits,
    RoleLoad,
    StrategyChoice,
)
from gcore_runs.engines import stage_of
from gcore_runs.run_folder import write_atomically
from gcore_runs.settings.run_config import PlacementConfig

_NUM_ROUNDS = 20
"""Number of rounds in which the most loaded engines are looked for."""
_SLACK = 0.1
"""A role that waited for less than this fraction of its time was not held up."""
_CUT_S = 1e-3
"""Two spans of a device that are closer are one."""
_FORMAT = 3
"""Format of the file of a placement's state; others are not read."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Sampling:
    """The sampling of all roles in a period."""

    loads: Sequence[RoleLoad]
    start_s: float
    """Time of the first request."""
    end_s: float
    """Time of the last verdict."""


class LivePlacement:
    """A dynamic partition of engines that observes their work and moves them one by one, or more after a jump.

    It decides after each step, and after each wave of dynamic sampling that another one follows in its step. A round
    of the partition is such a wave, or what is left of a step after them; it counts by its prompts. Where controllers
    share engines, or all roles take turns, nothing can move within a step, and a step is one round.

    With ``auto``, it also chooses between that and engines of all roles on every device, in turns. Every controller
    keeps an engine of the policy, and one of each judge is always there. It starts with the engines as ``whole``
    divides them, or as a run of these sizes and settings that is resumed has left them.

    Args:
        whole: the sizes, with the engines as they are divided at first.
        file: holds the state from round to round.
    """

    def __init__(self, whole: Sizes, config: PlacementConfig, file: Path) -> None:
        self.whole = whole
        self._config = config
        self._file = file
        policy = RoleLimits(devices_per_replica=1, min_replicas=whole.controllers)
        judges = (RoleLimits(devices_per_replica=1),) * len(whole.judges)
        self._space = PartitionSpace(num_devices=whole.engines + whole.num_judges, roles=(policy, *judges))
        self._stages = [stage_of(role) for role in ("engine", *whole.judges)]
        self._dynamic = self._started_at([whole.engines, *whole.judges.values()])
        self._choice: StrategyChoice | None = None
        if config.strategy == "auto":
            self._choice = StrategyChoice(self._space, horizon_steps=config.horizon_steps)
        self.swap_s: float | None = None if self._choice is not None else 0.0
        """Seconds to put all roles' engines to sleep and to wake them, as last measured; None: not yet."""
        self._unit_s: dict[str, deque[float]] = {stage: deque(maxlen=_NUM_ROUNDS) for stage in self._stages}
        """Device-seconds per token, or image, of each role in the last rounds."""
        self._move_s = self._move_within_s = 0.0
        self._moved_at_s: float | None = None
        self._waves: list[Round] = []
        """The waves of the present step so far."""
        self._are_rounds = False
        """Whether each of these waves is a round of the partition."""
        self._began_s = math.inf
        """Time of the first request of the present step."""
        self._load_state()

    @property
    def sizes(self) -> Sizes:
        """The sizes, with the engines as they are to be divided."""
        if self._choice is not None and STRATEGIES[self._choice.strategy].is_time_shared:
            every = self._space.num_devices
            return replace(self.whole, engines=every, judges=dict.fromkeys(self.whole.judges, every), in_turns=True)
        engines, *judges = self._dynamic.partition.replicas
        return replace(self.whole, engines=engines, judges=dict(zip(self.whole.judges, judges, strict=True)))

    def observe_wave(self, wave: Round) -> None:
        """Observe a wave of sampling that another one follows in the same step."""
        if wave.number == 1:
            sizes = self.sizes
            self._waves = []
            fewest = min(sizes.engines, *sizes.judges.values())
            self._are_rounds = not sizes.in_turns and fewest >= sizes.controllers
            self._began_s = math.inf
        self._waves.append(wave)
        if self._are_rounds and (found := self._loads(wave.work)) is not None:
            work = DeviceWork.merged(own.work for own in self._waves)
            self._observe_round(wave, found, work, is_within_step=True)
            self._save()

    def observe(self, metrics: Mapping[str, float], last: Round) -> None:
        """Observe a step, and its last round: what is left of it after the waves that were observed."""
        now_s = time.monotonic()
        before = self.sizes
        rounds = [*(self._waves if last.number > 1 else ()), last]
        self._waves = []
        work = DeviceWork.merged(own.work for own in rounds)
        whole = Round(number=1, num_prompts=sum(own.num_prompts for own in rounds), work=work)
        if self._moved_at_s is not None:
            # From the decision to the end of the first step after it, or within that.
            pause_s = now_s - self._moved_at_s - metrics["timing_s/step"]
            self._move_s = max(0.0, pause_s, *_swaps_s(work))
            self._moved_at_s = None
        left = last if len(rounds) > 1 and self._are_rounds else whole
        if left is whole:
            self._began_s = math.inf
        found = self._loads(left.work)
        if found is not None and not before.in_turns:
            self._observe_round(left, found, work, is_within_step=False)
        if left is not whole and self._choice is not None:
            found = self._loads(work)
        if found is None:
            return
        if self._choice is not None:
            self._choose(self._choice, found, whole, num_turns=max(1.0, metrics.get("sampling/waves", 1.0)))
        if self.sizes != before:
            self._moved_at_s = now_s
        self._save()

    def _observe_round(self, done: Round, found: _Sampling, work: DeviceWork, *, is_within_step: bool) -> None:
        """Observe a round; ``work`` is that of its step so far."""
        if not done.num_prompts:
            return
        # Before the first request engines wake.
        self._began_s = min(self._began_s, found.start_s)
        self._move_within_s = max(_swaps_s(work, self._began_s, found.end_s), default=self._move_within_s)
        moves_s = {"move_s": self._move_s, "move_within_s": self._move_within_s}
        self._dynamic.config = replace(self._dynamic.config, **moves_s)
        self._dynamic.observe(*found.loads, size=done.num_prompts, is_within_step=is_within_step)

    def _choose(self, choice: StrategyChoice, found: _Sampling, step: Round, *, num_turns: float) -> None:
        """Choose the strategy of the next step after one that was sampled in so many turns."""
        before = self.sizes
        choice.switch_s = self._move_s
        if before.in_turns or self.swap_s is None:
            # Those of the device that swapped for longest. Where engines take turns with ranks, too, they swap
            # before and after sampling with any placement.
            period = (found.start_s, found.end_s) if before.ranks_in_turns else ()
            swaps_s = (sum(_swaps_s(DeviceWork(spans={"": own}), *period)) for own in step.work.spans.values())
            self.swap_s = max(swaps_s, default=0.0) / num_turns
        stage_s = found.end_s - found.start_s
        strategy = choice.observe(*found.loads, stage_s=stage_s, swap_s=self.swap_s * num_turns)
        if before.in_turns and STRATEGIES[strategy].follows_load:
            best = self._dynamic.best([load.work_device_s for load in found.loads])
            self._dynamic = self._started_at(best.devices)

    def _loads(self, work: DeviceWork) -> _Sampling | None:
        """Return how all roles sampled; None: a role had nothing to do."""
        spans = {stage: [s for own in work.spans.values() for s in own if s.stage == stage] for stage in self._stages}
        busy_s = {stage: sum(span.end_s - span.start_s for span in own) for stage, own in spans.items()}
        work_s = {stage: self._work_s(stage, busy_s[stage], work.generated[stage]) for stage in self._stages}
        if not all(spans.values()):
            return None
        start_s = min(span.start_s for span in spans["gen"])
        finish_s = {stage: max(span.end_s for span in own) - start_s for stage, own in spans.items()}
        # A judge is done soon after the last response, however many replicas it has, or it is what is waited for.
        slack_s = _SLACK * finish_s["gen"]
        was_waiting = {stage: finish_s[stage] - finish_s["gen"] < slack_s for stage in self._stages}
        was_waiting["gen"] = finish_s["gen"] - _covered_s(spans["gen"]) > slack_s
        loads = [
            RoleLoad(
                work_device_s=work_s[stage],
                busy_device_s=busy_s[stage],
                finish_s=finish_s[stage],
                was_waiting=was_waiting[stage],
            )
            for stage in self._stages
        ]
        return _Sampling(loads=loads, start_s=start_s, end_s=start_s + max(finish_s.values()))

    def _work_s(self, stage: str, busy_s: float, generated: float) -> float:
        """Return the device-seconds of a role's work, as if its engines were as full as they recently were at most."""
        if not (generated and busy_s):
            return busy_s
        self._unit_s[stage].append(busy_s / generated)
        return generated * min(self._unit_s[stage])

    def metrics(self) -> dict[str, float]:
        """Return the engines of each role, and the measured costs of changes."""
        sizes = self.sizes
        of_each = sizes.judges if len(sizes.judges) > 1 else {}
        return {
            "placement/engines": float(sizes.engines),
            "placement/judges": float(sizes.num_judges),
            **{f"placement/judges/{role}": float(number) for role, number in of_each.items()},
            "placement/in_turns": float(sizes.in_turns),
            "placement/move_s": self._move_s,
            "placement/move_within_s": self._move_within_s,
            "placement/swap_s": self.swap_s or 0.0,
        }

    def _of(self) -> dict[str, Any]:
        """Return what a state belongs to: it says nothing of other sizes, or under other settings."""
        return {"format": _FORMAT, "whole": asdict(self.whole), "config": asdict(self._config)}

    def _state(self) -> dict[str, Any]:
        return {
            **self._of(),
            "dynamic": self._dynamic.state(),
            "choice": self._choice.state() if self._choice is not None else None,
            "swap_s": self.swap_s,
            "move_s": self._move_s,
            "move_within_s": self._move_within_s,
            "unit_s": {role: list(seconds) for role, seconds in self._unit_s.items()},
        }

    def _save(self) -> None:
        write_atomically(self._file, lambda path: path.write_text(json.dumps(self._state())))

    def _load_state(self) -> None:
        if not self._file.exists():
            return
        state: dict[str, Any] = json.loads(self._file.read_text())
        if any(state.get(name) != value for name, value in self._of().items()):
            _logger.info("%s is of other sizes or settings: the placement starts again", self._file)
            return
        self._dynamic.load_state(state["dynamic"])
        if self._choice is not None:
            self._choice.load_state(state["choice"])
        self.swap_s = state["swap_s"]
        self._move_s = state["move_s"]
        self._move_within_s = state["move_within_s"]
        for role, seconds in self._unit_s.items():
            seconds.extend(state["unit_s"][role])

    def _started_at(self, devices: Sequence[int]) -> DynamicPartition:
        # Loans within a step change the devices of a role, so that its time on them says nothing of its work.
        config = DynamicPartitionConfig(horizon_steps=self._config.horizon_steps, is_corrected=False)
        return DynamicPartition(self._space, self._space.nearest(*devices), config)


def _covered_s(spans: Sequence[Span]) -> float:
    """Return the seconds in which there is at least one span."""
    total_s = 0.0
    end_s = float("-inf")
    for start_s, stop_s in sorted((span.start_s, span.end_s) for span in spans):
        total_s += max(0.0, stop_s - max(start_s, end_s))
        end_s = max(end_s, stop_s)
    return total_s


def _swaps_s(work: DeviceWork, first_s: float = -math.inf, end_s: float = math.inf) -> list[float]:
    """Return the seconds of each swap that started in a period; the end of a round cuts one in two."""
    found: list[float] = []
    for own in work.spans.values():
        swaps = sorted((s.start_s, s.end_s) for s in own if s.stage == "swap" and first_s <= s.start_s < end_s)
        last_end_s = -math.inf
        for start_s, stop_s in swaps:
            if start_s - last_end_s < _CUT_S:
                found[-1] += stop_s - last_end_s
            else:
                found.append(stop_s - start_s)
            last_end_s = stop_s
    return found
