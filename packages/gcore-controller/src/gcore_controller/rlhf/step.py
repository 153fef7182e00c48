"""The RLHF program that every controller runs: sample, score, prepare, train, sync, record."""

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

from gcore_controller.context import Context, Span, merge_spans, on_wall_clock, seconds_by_stage
from gcore_controller.errors import RewardFailuresError
from gcore_controller.rlhf.batch_producer import BatchProducer, reshard_controller_states
from gcore_controller.rlhf.modality import (
    EvaluationT,
    FailureLog,
    GroupT,
    Modality,
    PromptT,
    Recorder,
    RewardCalls,
    RLHFConfig,
    RolesT,
    RunStart,
    TrainingBatch,
    UpdateT,
)
from gcore_controller.trainer_group import State

_MIN_CALLS = 32
"""Fewest calls that a fraction of failed ones is computed over: one failure in a small batch means little."""


class RLHFLoop(Generic[RolesT, PromptT, GroupT, UpdateT, EvaluationT]):
    """One controller's part of a run (G-Core, arXiv 2507.22789, figure 2).

    Args:
        ctx: the controller's place in the run.
        modality: what is sampled, scored and trained.
        config: of the loop.
        start: where the run starts or resumes.
        recorder: takes in what happens.
    """

    def __init__(
        self,
        ctx: Context[RolesT],
        modality: Modality[RolesT, PromptT, GroupT, UpdateT, EvaluationT],
        config: RLHFConfig,
        start: RunStart,
        recorder: Recorder[EvaluationT],
    ) -> None:
        self._ctx = ctx
        self._modality = modality
        self._config = config
        self._start = start
        self._recorder = recorder
        self._failures = _RewardFailures(modality.failure_logs(ctx), max_share=config.max_failed_share)
        self._cpu_s = time.process_time()
        state = None
        if start.controllers is not None:
            state = reshard_controller_states(start.controllers, ctx.rank, ctx.world_size)
            modality.load_state(state)
        self._batches = BatchProducer(ctx, modality, config, first_step=start.first_step, state=state)

    async def run(self) -> None:
        """Run from the first step to the last.

        Raises:
            RewardFailuresError: too large a share of the last reward calls failed.
        """
        ctx, config, start = self._ctx, self._config, self._start
        if start.is_policy_behind:
            await self._modality.update_policy(ctx, start.first_step)
        else:
            await ctx.roles.learner.check_policy(ctx.roles.policy)
        if not start.is_evaluated:
            await self.evaluate(start.first_step)
        self._forget_times()
        async with self._batches.running():
            for step in range(start.first_step + 1, config.total_steps + 1):
                await self.step(step)
                if config.is_evaluation_due(step):
                    await self.evaluate(step)

    async def step(self, step: int) -> None:
        """Make one step, on all controllers together."""
        ctx, modality = self._ctx, self._modality
        start_s = ctx.clock()
        # Sample and score, now or ahead of time.
        batch = await self._batches.next()
        metrics = {**batch.metrics, modality.HAS_SIGNAL: 0.0}
        if ctx.rank == 0:
            await self._recorder.updating()
        if batch.num_groups:
            with ctx.timer.stage("prepare"):
                prepared = await modality.prepare(ctx, step, batch)
            with ctx.timer.stage("train"):
                trained = [await modality.update(ctx, step, update) for update in prepared.updates]
            with ctx.timer.stage("sync"):
                async with self._batches.weights_changing():
                    await modality.update_policy(ctx, step)
                    synced = await modality.synced_metrics(ctx, step, batch)
            metrics |= prepared.metrics | modality.update_metrics(trained) | synced
        await self._record(step, metrics, batch, step_s=ctx.clock() - start_s)

    async def evaluate(self, step: int) -> None:
        """Evaluate the policy on held-out prompts, if there are any."""
        evaluation = await self._modality.evaluate(self._ctx, step)
        if evaluation is None:
            return
        failures, _ = self._failures.merge(await self._ctx.group.all_gather(self._failures.drain()))
        if self._ctx.rank == 0:
            if failures:
                await self._recorder.rewards_failed(step, failures)
            await self._recorder.evaluated(step, evaluation)
        self._failures.check()
        self._forget_times()

    def _forget_times(self) -> None:
        """Discard the times until now, which belong to no step."""
        self._ctx.timer.drain()
        self._ctx.roles.devices.drain()

    async def _record(
        self, step: int, metrics: dict[str, float], batch: TrainingBatch[GroupT], *, step_s: float
    ) -> None:
        """Gather all controllers' parts of the record of a step; rank 0 passes them to the recorder."""
        ctx, devices = self._ctx, self._ctx.roles.devices
        spans = ctx.timer.drain()
        now_s = ctx.clock()
        ahead = {f"sampling {ctx.rank}": on_wall_clock(batch.spans, now_s, ctx.wall_clock)} if batch.spans else {}
        own = _Part(
            state={**batch.state, **self._modality.state()},
            spans=on_wall_clock(spans, now_s, ctx.wall_clock),
            # Controllers of one process share the timers; the first to drain them reports everything.
            generated=Counter(devices.generated),
            devices=ahead | devices.drain(),
            load=self._load(step_s),
            rewards=self._failures.drain(),
        )
        parts = await ctx.group.all_gather(own)
        failures, failed = self._failures.merge([part.rewards for part in parts])
        if ctx.rank == 0:
            generated = sum((part.generated for part in parts), Counter[str]())
            metrics = {
                **metrics,
                **{f"timing_s/{stage}": value for stage, value in seconds_by_stage([*spans, *batch.spans]).items()},
                "timing_s/step": step_s,
                "perf/throughput": metrics.get(self._modality.throughput_of, 0.0) / step_s,
                **{f"perf/generated/{stage}": float(number) for stage, number in generated.items()},
                **failed,
            }
            loads = [part.load for part in parts if part.load is not None]
            if loads:
                metrics |= {"controller/load/max": max(loads), "controller/load/mean": sum(loads) / len(loads)}
            if failures:
                await self._recorder.rewards_failed(step, failures)
            merged = merge_spans(part.devices for part in parts)
            await self._recorder.stepped(step, metrics, [part.spans for part in parts], merged)
            await self._recorder.reached(step, [part.state for part in parts])
        self._failures.check()

    def _load(self, step_s: float) -> float | None:
        """Return the share of a step that this controller's process computed; None: others compute in it, too."""
        before_s, self._cpu_s = self._cpu_s, time.process_time()
        return (self._cpu_s - before_s) / step_s if self._ctx.roles.owns_process else None


@dataclass(frozen=True)
class _Part:
    """One controller's part of a step's record."""

    state: State
    spans: list[Span]
    devices: dict[str, list[Span]]
    generated: Counter[str]
    load: float | None
    rewards: RewardCalls


class _RewardFailures:
    """The fraction of reward calls that failed over the last steps, on all controllers; too many end the run."""

    def __init__(self, logs: Sequence[FailureLog], *, max_share: float) -> None:
        self._logs = logs
        self._max_share = max_share
        self._recent: deque[tuple[int, int]] = deque()
        self._last: list[Any] = []

    def drain(self) -> RewardCalls:
        """Return the calls since the last time, of every controller that shares the rewards with this one."""
        drained = [log.drain() for log in self._logs]
        return sum(calls for calls, _ in drained), [failure for _, failures in drained for failure in failures]

    def merge(self, calls_by_rank: Iterable[RewardCalls]) -> tuple[list[Any], dict[str, float]]:
        """Return all controllers' failures by kind, and metrics of them."""
        found: dict[str, Any] = {}
        num_calls = 0
        for calls, failures in calls_by_rank:
            num_calls += calls
            for failure in failures:
                before = found.get(failure.kind)
                found[failure.kind] = failure if before is None else replace(before, count=before.count + failure.count)
        num_failed = sum(failure.count for failure in found.values())
        self._recent.append((num_calls, num_failed))
        while sum(calls for calls, _ in self._recent) - self._recent[0][0] >= _MIN_CALLS:
            self._recent.popleft()
        self._last = sorted(found.values(), key=lambda failure: -failure.count) or self._last
        return list(found.values()), {"reward/failed_fraction": num_failed / num_calls} if num_calls else {}

    def check(self) -> None:
        """Raise if more than the tolerated fraction of the last calls failed."""
        num_calls, num_failed = (sum(column) for column in zip(*self._recent, strict=True))
        if num_calls < _MIN_CALLS or num_failed <= self._max_share * num_calls:
            return
        worst = self._last[0]
        raise RewardFailuresError(
            f"{num_failed} of the last {num_calls} rewards failed; expected at most a share of "
            f"reward_calls.max_failed_share = {self._max_share:g}. The most frequent error: {worst.kind}: "
            f"{worst.message or 'no message'}"
        )
