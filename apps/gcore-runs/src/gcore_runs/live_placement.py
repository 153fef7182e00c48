"""The placement of a run's engines, which follows their measured load from wave to wave, over resumptions, too."""

import json
import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
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
from gcore_runs.settings.sections import PlacementConfig

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
    keeps an engine of the policy, and one of each judge is always there. It starts with the engines as ``initial``
    divides them, or as a run of these sizes and settings that is resumed has left them.

    Args:
        initial: the sizes, with the engines as they are divided at first.
        file: holds the state from round to round.
    """

    def __init__(self, initial: Sizes, config: PlacementConfig, file: Path) -> None:
        self.initial = initial
        self._config = config
        self._file = file
        policy = RoleLimits(devices_per_replica=1, min_replicas=initial.controllers)
        judges = (RoleLimits(devices_per_replica=1),) * len(initial.judges)
        self._space = PartitionSpace(
            num_devices=initial.engines + initial.num_judges, roles=(policy, *judges)
        )
        self._stages = [stage_of(role) for role in ("engine", *initial.judges)]
        self._dynamic = self._start_at([initial.engines, *initial.judges.values()])
        self._choice: StrategyChoice | None = None
        if config.strategy == "auto":
            self._choice = StrategyChoice(self._space, horizon_steps=config.horizon_steps)
        self.swap_s: float | None = None if self._choice is not None else 0.0
        """Seconds to put all roles' engines to sleep and to wake them, as last measured; None: not yet."""
        self._unit_s: dict[str, deque[float]] = {
            stage: deque(maxlen=_NUM_ROUNDS) for stage in self._stages
        }
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
            num_devices = self._space.num_devices
            judges = dict.fromkeys(self.initial.judges, num_devices)
            return replace(self.initial, engines=num_devices, judges=judges, in_turns=True)
        engines, *num_judges = self._dynamic.partition.replicas
        return replace(
            self.initial,
            engines=engines,
            judges=dict(zip(self.initial.judges, num_judges, strict=True)),
        )

    def observe_wave(self, wave: Round) -> None:
        """Observe a wave of sampling that another one follows in the same step."""
        if wave.number == 1:
            sizes = self.sizes
            self._waves = []
            fewest = min(sizes.engines, *sizes.judges.values())
            self._are_rounds = not sizes.in_turns and fewest >= sizes.controllers
            self._began_s = math.inf
        self._waves.append(wave)
        if not self._are_rounds:
            return
        sampling = self._loads(wave.work)
        if sampling is not None:
            work = DeviceWork.merge(wave.work for wave in self._waves)
            self._observe_round(wave, sampling, work, is_within_step=True)
            self._save()

    def observe(self, metrics: Mapping[str, float], last: Round) -> None:
        """Observe a step, and its last round: what is left of it after the waves that were observed."""
        now_s = time.monotonic()
        before = self.sizes
        rounds = [last]
        if last.number > 1:
            rounds = [*self._waves, last]
        self._waves = []
        work = DeviceWork.merge(part.work for part in rounds)
        step = Round(number=1, num_prompts=sum(part.num_prompts for part in rounds), work=work)
        if self._moved_at_s is not None:
            # From the decision to the end of the first step after it, or within that.
            pause_s = now_s - self._moved_at_s - metrics["timing_s/step"]
            self._move_s = max(0.0, pause_s, *_swaps_s(work))
            self._moved_at_s = None
        is_divided = len(rounds) > 1 and self._are_rounds
        final_round = last if is_divided else step
        if not is_divided:
            self._began_s = math.inf
        sampling = self._loads(final_round.work)
        if sampling is not None and not before.in_turns:
            self._observe_round(final_round, sampling, work, is_within_step=False)
        if is_divided and self._choice is not None:
            sampling = self._loads(work)
        if sampling is None:
            return
        if self._choice is not None:
            self._choose(
                self._choice, sampling, step, num_turns=max(1.0, metrics.get("sampling/waves", 1.0))
            )
        if self.sizes != before:
            self._moved_at_s = now_s
        self._save()

    def _observe_round(
        self, done: Round, sampling: _Sampling, work: DeviceWork, *, is_within_step: bool
    ) -> None:
        """Observe a round; ``work`` is that of its step so far."""
        if not done.num_prompts:
            return
        # Before the first request engines wake.
        self._began_s = min(self._began_s, sampling.start_s)
        self._move_within_s = max(
            _swaps_s(work, self._began_s, sampling.end_s), default=self._move_within_s
        )
        self._dynamic.config = replace(
            self._dynamic.config, move_s=self._move_s, move_within_s=self._move_within_s
        )
        self._dynamic.observe(*sampling.loads, size=done.num_prompts, is_within_step=is_within_step)

    def _choose(
        self, choice: StrategyChoice, sampling: _Sampling, step: Round, *, num_turns: float
    ) -> None:
        """Choose the strategy of the next step after one that was sampled in so many turns."""
        before = self.sizes
        choice.switch_s = self._move_s
        if before.in_turns or self.swap_s is None:
            # Those of the device that swapped for longest. Where engines take turns with ranks, too, they swap
            # before and after sampling with any placement.
            period = (sampling.start_s, sampling.end_s) if before.ranks_in_turns else ()
            swaps_s = [sum(_device_swaps_s(spans, *period)) for spans in step.work.spans.values()]
            self.swap_s = max(swaps_s, default=0.0) / num_turns
        stage_s = sampling.end_s - sampling.start_s
        strategy = choice.observe(*sampling.loads, stage_s=stage_s, swap_s=self.swap_s * num_turns)
        if before.in_turns and STRATEGIES[strategy].follows_load:
            best = self._dynamic.best([load.work_device_s for load in sampling.loads])
            self._dynamic = self._start_at(best.devices)

    def _loads(self, work: DeviceWork) -> _Sampling | None:
        """Return how all roles sampled; None: a role had nothing to do."""
        spans: dict[str, list[Span]] = {stage: [] for stage in self._stages}
        for span in chain.from_iterable(work.spans.values()):
            if span.stage in spans:
                spans[span.stage].append(span)
        busy_s: dict[str, float] = {}
        work_s: dict[str, float] = {}
        for stage in self._stages:
            busy_s[stage] = sum(span.end_s - span.start_s for span in spans[stage])
            work_s[stage] = self._work_s(stage, busy_s[stage], work.generated[stage])
        if not all(spans.values()):
            return None
        start_s = min(span.start_s for span in spans["gen"])
        policy_end_s = max(span.end_s for span in spans["gen"]) - start_s
        slack_s = _SLACK * policy_end_s
        loads: list[RoleLoad] = []
        for stage in self._stages:
            finish_s = max(span.end_s for span in spans[stage]) - start_s
            if stage == "gen":
                was_waiting = finish_s - _covered_s(spans[stage]) > slack_s
            else:
                # A judge is done soon after the last response, however many replicas it has, or it is waited for.
                was_waiting = finish_s - policy_end_s < slack_s
            loads.append(
                RoleLoad(
                    work_device_s=work_s[stage],
                    busy_device_s=busy_s[stage],
                    finish_s=finish_s,
                    was_waiting=was_waiting,
                )
            )
        return _Sampling(
            loads=loads, start_s=start_s, end_s=start_s + max(load.finish_s for load in loads)
        )

    def _work_s(self, stage: str, busy_s: float, generated: float) -> float:
        """Return the device-seconds of a role's work, as if its engines were as full as they recently were at most."""
        if not (generated and busy_s):
            return busy_s
        self._unit_s[stage].append(busy_s / generated)
        return generated * min(self._unit_s[stage])

    def metrics(self) -> dict[str, float]:
        """Return the engines of each role, and the measured costs of changes."""
        sizes = self.sizes
        metrics = {
            "placement/engines": float(sizes.engines),
            "placement/judges": float(sizes.num_judges),
        }
        if len(sizes.judges) > 1:
            metrics |= {
                f"placement/judges/{role}": float(number) for role, number in sizes.judges.items()
            }
        return metrics | {
            "placement/in_turns": float(sizes.in_turns),
            "placement/move_s": self._move_s,
            "placement/move_within_s": self._move_within_s,
            "placement/swap_s": self.swap_s or 0.0,
        }

    def _fingerprint(self) -> dict[str, Any]:
        """Return format, sizes and settings that a state belongs to; it is not read with others."""
        return {"format": _FORMAT, "whole": asdict(self.initial), "config": asdict(self._config)}

    def _save(self) -> None:
        state = {
            **self._fingerprint(),
            "dynamic": self._dynamic.state(),
            "choice": self._choice.state() if self._choice is not None else None,
            "swap_s": self.swap_s,
            "move_s": self._move_s,
            "move_within_s": self._move_within_s,
            "unit_s": {role: list(seconds) for role, seconds in self._unit_s.items()},
        }
        write_atomically(self._file, lambda path: path.write_text(json.dumps(state)))

    def _load_state(self) -> None:
        if not self._file.exists():
            return
        state: dict[str, Any] = json.loads(self._file.read_text())
        if any(state.get(name) != value for name, value in self._fingerprint().items()):
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

    def _start_at(self, devices: Sequence[int]) -> DynamicPartition:
        # Loans within a step change the devices of a role, so that its time on them says nothing of its work.
        config = DynamicPartitionConfig(
            horizon_steps=self._config.horizon_steps, is_corrected=False
        )
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
    """Return the seconds of each swap of all devices that started in a period; see `_device_swaps_s`."""
    seconds: list[float] = []
    for spans in work.spans.values():
        seconds.extend(_device_swaps_s(spans, first_s, end_s))
    return seconds


def _device_swaps_s(
    spans: Sequence[Span], first_s: float = -math.inf, end_s: float = math.inf
) -> list[float]:
    """Return the seconds of each swap of a device that started in a period; the end of a round cuts one in two."""
    seconds: list[float] = []
    swaps = sorted(
        (s.start_s, s.end_s) for s in spans if s.stage == "swap" and first_s <= s.start_s < end_s
    )
    last_end_s = -math.inf
    for start_s, stop_s in swaps:
        if start_s - last_end_s < _CUT_S:
            seconds[-1] += stop_s - last_end_s
        else:
            seconds.append(stop_s - start_s)
        last_end_s = stop_s
    return seconds
