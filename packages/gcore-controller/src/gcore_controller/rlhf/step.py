"""The RLHF program that every controller runs: sample, score, prepare, train, sync, record."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Generic

from gcore_controller.context import (
    Context,
    DeviceWork,
    Span,
    StageTimer,
    on_wall_clock,
    seconds_by_stage,
)
from gcore_controller.errors import ControllerError
from gcore_controller.rlhf.batch_producer import BatchProducer
from gcore_controller.rlhf.events import (
    Evaluated,
    Recorder,
    Stepped,
    Updating,
)
from gcore_controller.rlhf.modality import (
    EvaluationT,
    GroupT,
    Modality,
    PromptT,
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


@dataclass(eq=False)
class RLHFLoop(Generic[RolesT, PromptT, GroupT, UpdateT, EvaluationT]):
    """One controller's part of a run (G-Core, arXiv 2507.22789, figure 2).

    Where the models in training and the engines share devices, ``offload`` hands these to the engines, ``onload`` to
    the models, and ``onload_weights`` leaves the policy's weights next to those of its engine, which
    ``update_weights`` overwrites; otherwise only the last does anything.

    Example:
        >>> config = RLHFConfig(total_steps=100, train_batch_size=32, test_freq=10)
        >>> def make_program(modality: Modality, recorder: Recorder) -> Program:
        ...     async def program(ctx: Context) -> None:
        ...         await RLHFLoop(ctx, modality, config, RunStart(), recorder).run()
        ...     return program
    """

    ctx: Context[RolesT]
    modality: Modality[RolesT, PromptT, GroupT, UpdateT, EvaluationT]
    config: RLHFConfig
    start: RunStart
    recorder: Recorder
    """Called by rank 0."""

    def __post_init__(self) -> None:
        ctx = self.ctx
        config = self.config
        start = self.start
        self._failures = _RewardFailures(max_share=config.max_failed_share)
        self._cpu_s = time.process_time()
        state = None
        if start.controllers is not None:
            state = _reshard(start.controllers, ctx.rank, ctx.world_size)
            self.modality.load_state(start.controllers[0])
        if config.schedule != "sync":
            ctx = replace(ctx, group=ctx.group.channel("sampling"), timer=StageTimer(ctx.clock))
        report = None
        if config.reports_waves and config.schedule == "sync":
            report = self.recorder
        producer = BatchProducer(
            ctx, self.modality, config, first_step=start.first_step, state=state, report=report
        )
        self._batches = _ScheduledBatches(
            producer, ctx.timer, config, config.total_steps - start.first_step
        )

    async def run(self) -> None:
        """Run from the first step to the last.

        Raises:
            ControllerError: too large a share of the last reward calls failed.
        """
        ctx = self.ctx
        config = self.config
        start = self.start
        learner = ctx.roles.learner
        await learner.onload_weights(ctx.timer)
        if start.is_policy_behind:
            await self.modality.update_weights(ctx, start.first_step)
        else:
            await learner.check_policy(ctx.roles.policy)
        if not start.is_evaluated:
            await self.evaluate(start.first_step)
        self._forget_times()
        try:
            async with self._batches.running():
                for step in range(start.first_step + 1, config.total_steps + 1):
                    await self.step(step)
                    if step % config.test_freq == 0 or step == config.total_steps:
                        await self.evaluate(step)
        finally:
            await self.modality.close()

    async def step(self, step: int) -> None:
        """Make one step, on all controllers together."""
        ctx = self.ctx
        modality = self.modality
        learner = ctx.roles.learner
        start_s = ctx.clock()
        # Sample and score, now or ahead of time.
        await learner.offload(ctx.timer)
        batch = await self._batches.next()
        metrics = {**batch.metrics, modality.HAS_SIGNAL: 0.0}
        prepared = None
        if ctx.rank == 0:
            await self.recorder(Updating())
        if batch.num_groups:
            await learner.onload(ctx.timer)
            with ctx.timer.stage("prepare"):
                prepared = await modality.prepare(ctx, step, batch)
            with ctx.timer.stage("train"):
                trained = [await modality.update(ctx, step, update) for update in prepared.updates]
            await learner.onload_weights(ctx.timer)
            with ctx.timer.stage("sync"):
                async with self._batches.weights_changing():
                    await modality.update_weights(ctx, step)
                    synced = await modality.synced_metrics(ctx, step, batch)
            metrics |= prepared.metrics | modality.update_metrics(trained) | synced
        # A policy that is saved takes memory, which keys and values have still if there was no update.
        await learner.onload_weights(ctx.timer)
        step_s = ctx.clock() - start_s
        samples = modality.samples(ctx, step, batch, prepared) if self.config.log_samples else ()
        await self._record(step, metrics, batch, samples, step_s=step_s)

    async def evaluate(self, step: int) -> None:
        """Evaluate the policy on held-out prompts, if there are any."""
        await self.ctx.roles.learner.offload(self.ctx.timer)
        evaluation = await self.modality.evaluate(self.ctx, step)
        if evaluation is None:
            return
        failures, _ = await self._merge_failures()
        if self.modality.saves_evaluated:
            await self.ctx.roles.learner.onload_weights(self.ctx.timer)
        if self.ctx.rank == 0:
            await self.recorder(Evaluated(step=step, evaluation=evaluation, failures=failures))
        self._failures.check()
        self._forget_times()

    async def _merge_failures(self) -> tuple[list[Any], dict[str, float]]:
        """Return the failures of rewards on all controllers, each of which checks them; see `_RewardFailures.merge`."""
        drained = self.modality.drain_failures(self.ctx)
        return self._failures.merge(await self.ctx.group.all_gather(drained))

    def _forget_times(self) -> None:
        """Discard the times until now, which belong to no step."""
        self.ctx.timer.drain()
        self.ctx.roles.devices.drain()

    async def _record(
        self,
        step: int,
        metrics: dict[str, float],
        batch: TrainingBatch[GroupT],
        samples: Sequence[tuple[int, dict[str, Any]]],
        *,
        step_s: float,
    ) -> None:
        """Gather all controllers' parts of the record of a step; rank 0 passes them to the recorder."""
        ctx = self.ctx
        spans = ctx.timer.drain()
        now_s = ctx.clock()
        work = ctx.roles.devices.drain()
        if batch.spans:
            ahead = on_wall_clock(batch.spans, now_s, ctx.wall_clock)
            work = DeviceWork.merge([DeviceWork(spans={f"sampling {ctx.rank}": ahead}), work])
        # The share of the step that this process computed, if no other controller computes in it.
        before_s = self._cpu_s
        self._cpu_s = time.process_time()
        load = None
        if ctx.roles.owns_process and step_s > 0:
            load = (self._cpu_s - before_s) / step_s
        part = _Part(
            state={**batch.state, **self.modality.state()},
            spans=on_wall_clock(spans, now_s, ctx.wall_clock),
            work=work,
            load=load,
            samples=samples,
        )
        parts = await ctx.group.gather(part)
        failures, failed = await self._merge_failures()
        if ctx.rank == 0:
            *waves, last = batch.rounds
            last = replace(last, work=DeviceWork.merge(part.work for part in parts))
            work = DeviceWork.merge([*(wave.work for wave in waves), last.work])
            seconds = seconds_by_stage([*spans, *batch.spans])
            metrics = metrics | self._step_metrics(metrics, seconds, step_s, work) | failed
            loads = [part.load for part in parts if part.load is not None]
            if loads:
                metrics["controller/load/max"] = max(loads)
                metrics["controller/load/mean"] = sum(loads) / len(loads)
            numbered: list[tuple[int, dict[str, Any]]] = []
            for part in parts:
                numbered.extend(part.samples)
            numbered.sort(key=lambda row: row[0])
            await self.recorder(
                Stepped(
                    step=step,
                    metrics=metrics,
                    spans=[part.spans for part in parts],
                    devices=work.spans,
                    last=last,
                    controllers=[part.state for part in parts],
                    is_last=step == self.config.total_steps,
                    samples=[row for _, row in numbered[: self.config.log_samples]],
                    failures=failures,
                )
            )
        self._failures.check()

    def _step_metrics(
        self,
        metrics: Mapping[str, float],
        seconds: Mapping[str, float],
        step_s: float,
        work: DeviceWork,
    ) -> dict[str, float]:
        """Return the metrics of time of a step, from those of the modality and what was recorded."""
        throughput = 0.0
        # A coarse clock may not see a short step.
        if step_s > 0:
            throughput = metrics.get(self.modality.throughput_of, 0.0) / step_s
        timings: dict[str, float] = {}
        for stage, stage_s in seconds.items():
            timings[f"timing_s/{stage}"] = stage_s
        timings["timing_s/step"] = step_s
        timings["perf/throughput"] = throughput
        for stage, number in work.generated.items():
            timings[f"perf/generated/{stage}"] = float(number)
        if work.num_lent:
            timings["placement/lent"] = float(work.num_lent)
        return timings


@dataclass(frozen=True)
class _Part:
    """One controller's part of a step's record."""

    state: State
    spans: list[Span]
    work: DeviceWork
    load: float | None
    samples: Sequence[tuple[int, dict[str, Any]]]


class _ScheduledBatches(Generic[GroupT]):
    """The batches of all steps, as the schedule has them sampled; ``timer`` is that of the sampling.

    With ``sync`` a batch is sampled when it is needed. With ``one_step_off`` one batch is sampled while another is
    trained on, and weights change between batches: each is generated by the weights of the step before the last. With
    ``async`` batches are sampled without a pause, up to ``max_staleness`` ahead, and weights change in the middle of
    samples.
    """

    def __init__(
        self,
        producer: BatchProducer[Any, Any, GroupT],
        timer: StageTimer,
        config: RLHFConfig,
        num_batches: int,
    ) -> None:
        self._producer = producer
        self._timer = timer
        self._schedule = config.schedule
        self._num_left = num_batches
        self._sampled: asyncio.Queue[TrainingBatch[GroupT] | Exception] = asyncio.Queue()
        self._capacity = asyncio.Semaphore(
            config.max_staleness if config.schedule == "async" else 1
        )
        self._engine = asyncio.Lock()
        self._has_started = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Sample ahead, inside the block, unless the schedule is sync."""
        ahead: list[asyncio.Task[None]] = []
        if self._schedule != "sync":
            ahead.append(asyncio.create_task(self._sample_ahead(self._num_left)))
        try:
            yield
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)

    async def next(self) -> TrainingBatch[GroupT]:
        """Return the batch of the next step, see `BatchProducer.sample`."""
        if self._schedule == "sync":
            return await self._producer.sample()
        batch = await self._sampled.get()
        if isinstance(batch, Exception):
            raise batch
        self._has_started.clear()
        self._capacity.release()
        self._num_left -= 1
        if self._schedule == "one_step_off" and self._num_left:
            # The next batch starts before the weights change, however soon that is.
            await self._has_started.wait()
        return batch

    def weights_changing(self) -> AbstractAsyncContextManager[Any]:
        """Hold sampling back while the engines receive weights: between two batches, unless the schedule is async."""
        if self._schedule == "one_step_off":
            return self._engine
        return nullcontext()

    async def _sample_ahead(self, num_batches: int) -> None:
        try:
            for _ in range(num_batches):
                await self._capacity.acquire()
                async with self.weights_changing():
                    self._has_started.set()
                    batch = await self._producer.sample()
                self._sampled.put_nowait(replace(batch, spans=self._timer.drain()))
        except Exception as error:
            self._sampled.put_nowait(error)


class _RewardFailures:
    """The fraction of reward calls that failed over the last steps, on all controllers; too many end the run."""

    def __init__(self, *, max_share: float) -> None:
        self._max_share = max_share
        self._recent: deque[tuple[int, int]] = deque()
        self._worst: Any = None
        """The most frequent failure of the last step with any."""

    def merge(self, calls_by_rank: Iterable[RewardCalls]) -> tuple[list[Any], dict[str, float]]:
        """Return all controllers' failures by kind, and metrics of them."""
        failure_by_kind: dict[str, Any] = {}
        num_calls = 0
        for calls, rank_failures in calls_by_rank:
            num_calls += calls
            for failure in rank_failures:
                before = failure_by_kind.get(failure.kind)
                if before is not None:
                    failure = replace(before, count=before.count + failure.count)
                failure_by_kind[failure.kind] = failure
        failures = list(failure_by_kind.values())
        num_failed = sum(failure.count for failure in failures)
        self._recent.append((num_calls, num_failed))
        while sum(calls for calls, _ in self._recent) - self._recent[0][0] >= _MIN_CALLS:
            self._recent.popleft()
        if failures:
            self._worst = max(failures, key=lambda failure: failure.count)
        metrics: dict[str, float] = {}
        if num_calls:
            metrics["reward/failed_fraction"] = num_failed / num_calls
        return failures, metrics

    def check(self) -> None:
        """Raise if more than the tolerated fraction of the last calls failed."""
        num_calls = 0
        num_failed = 0
        for calls, failed in self._recent:
            num_calls += calls
            num_failed += failed
        if num_calls < _MIN_CALLS or num_failed <= self._max_share * num_calls:
            return
        worst = self._worst
        raise ControllerError(
            f"{num_failed} of the last {num_calls} rewards failed; expected at most a share of "
            f"reward_calls.max_failed_share = {self._max_share:g}. The most frequent error: {worst.kind}: "
            f"{worst.message or 'no message'}"
        )


def _reshard(states: Sequence[State], rank: int, world_size: int) -> State:
    """Return one controller's state from the states of any number of controllers; each group has one owner."""
    # The first controller has kept it for all.
    curriculum = states[0].get("curriculum")
    if len(states) == world_size:
        return {**states[rank], "curriculum": curriculum}

    def take_share(groups: Iterable[State]) -> list[State]:
        return sorted(groups, key=lambda g: g["ticket"])[rank::world_size]

    surplus: list[State] = []
    unfinished: list[State] = []
    for state in states:
        surplus += state["sampler"]["surplus"]
        unfinished += state.get("unfinished", [])
    first = states[0]
    sampler = {**first["sampler"], "surplus": take_share(surplus)}
    return {**first, "sampler": sampler, "unfinished": take_share(unfinished)}
