"""Recording of a run: all controllers' parts of a step are gathered, and rank 0 passes them to a recorder."""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from gcore_controller.context import Context
from gcore_controller.devices import generation_metrics, merge_spans
from gcore_controller.rlhf.config import State
from gcore_controller.rlhf.modality import GroupT, RolesT, TrainingBatch
from gcore_controller.rlhf.reward_failures import RewardCalls, RewardFailures
from gcore_controller.stages import Span, on_wall_clock, seconds_by_stage

EvaluationT = TypeVar("EvaluationT")
EvaluationT_contra = TypeVar("EvaluationT_contra", contravariant=True)


class Recorder(Protocol[EvaluationT_contra]):
    """Takes in what happens in a run; only rank 0 calls it."""

    async def evaluated(self, step: int, evaluation: EvaluationT_contra) -> None: ...

    async def updating(self) -> None:
        """Note that from here to `reached` the models are between two steps."""
        ...

    async def stepped(
        self, step: int, metrics: dict[str, float], spans: list[list[Span]], devices: dict[str, list[Span]]
    ) -> None:
        """Record a step's metrics, and where its time went: on each controller, by rank, and each device, by name."""
        ...

    async def rewards_failed(self, step: int, failures: list[Any]) -> None:
        """Record rewards that failed since the last call and were dropped: kind, message and count of each."""
        ...

    async def reached(self, step: int, controllers: list[State]) -> None:
        """Take a checkpoint, if one is due: all controllers are at the end of ``step``, with these states."""
        ...


@dataclass(frozen=True)
class _Part:
    """One controller's part of a step's record."""

    state: State
    spans: list[Span]
    devices: dict[str, list[Span]]
    generated: Counter[str]
    load: float | None
    rewards: RewardCalls


class Reporter(Generic[RolesT, EvaluationT]):
    """One controller's end of the recording: it gathers all controllers' parts, and calls the recorder on rank 0.

    Args:
        ctx: the controller's.
        recorder: takes in what is gathered.
        failures: of this controller's rewards.
        throughput_of: metric that ``perf/throughput`` is computed from.
    """

    def __init__(
        self,
        ctx: Context[RolesT],
        recorder: Recorder[EvaluationT],
        failures: RewardFailures,
        *,
        throughput_of: str,
    ) -> None:
        self._ctx = ctx
        self._recorder = recorder
        self._failures = failures
        self._throughput_of = throughput_of
        self._cpu_s = time.process_time()

    def discard(self) -> None:
        """Forget the times until now, which belong to no step."""
        self._ctx.timer.drain()
        self._ctx.roles.devices.drain()

    async def evaluated(self, step: int, evaluation: EvaluationT) -> None:
        """Record an evaluation.

        Raises:
            RewardFailuresError: see `RewardFailures.check`.
        """
        failures, _ = self._failures.merge(await self._ctx.group.all_gather(self._failures.drain()))
        if self._ctx.rank == 0:
            await self._report(step, failures)
            await self._recorder.evaluated(step, evaluation)
        self._failures.check()
        self.discard()

    async def updating(self) -> None:
        """See `Recorder.updating`."""
        if self._ctx.rank == 0:
            await self._recorder.updating()

    async def stepped(
        self, step: int, metrics: dict[str, float], batch: TrainingBatch[GroupT], state: State, *, step_s: float
    ) -> None:
        """Record a step of ``step_s`` seconds, at whose end this controller has ``state``.

        Raises:
            RewardFailuresError: see `RewardFailures.check`.
        """
        ctx = self._ctx
        spans = ctx.timer.drain()
        now_s = ctx.clock()
        metrics = metrics | {
            **{f"timing_s/{stage}": value for stage, value in seconds_by_stage([*spans, *batch.spans]).items()},
            "timing_s/step": step_s,
            "perf/throughput": metrics.get(self._throughput_of, 0.0) / step_s,
        }
        ahead = {f"sampling {ctx.rank}": on_wall_clock(batch.spans, now_s)} if batch.spans else {}
        own = _Part(
            state=state,
            spans=on_wall_clock(spans, now_s),
            # Controllers of one process share the timers; the first to drain them reports everything.
            generated=Counter(ctx.roles.devices.generated),
            devices=ahead | ctx.roles.devices.drain(),
            load=self._load(step_s),
            rewards=self._failures.drain(),
        )
        parts = await ctx.group.all_gather(own)
        failures, failed = self._failures.merge([part.rewards for part in parts])
        metrics |= generation_metrics(part.generated for part in parts) | failed
        loads = [part.load for part in parts if part.load is not None]
        if loads:
            metrics |= {"controller/load/max": max(loads), "controller/load/mean": sum(loads) / len(loads)}
        if ctx.rank == 0:
            await self._report(step, failures)
            devices = merge_spans(part.devices for part in parts)
            await self._recorder.stepped(step, metrics, [part.spans for part in parts], devices)
            await self._recorder.reached(step, [part.state for part in parts])
        self._failures.check()

    async def _report(self, step: int, failures: list[Any]) -> None:
        if failures:
            await self._recorder.rewards_failed(step, failures)

    def _load(self, step_s: float) -> float | None:
        """Return the share of a step that this controller's process computed; None: others compute in it, too."""
        before_s, self._cpu_s = self._cpu_s, time.process_time()
        return (self._cpu_s - before_s) / step_s if self._ctx.roles.owns_process else None
