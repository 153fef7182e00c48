"""The half of the loop that samples: waves of prompts until a step has its groups, now or ahead of the training.

Dynamic sampling is that of DAPO (arXiv 2503.14476, section 3.2) and G-Core (arXiv 2507.22789): a group whose responses
all score alike has no gradient, so other prompts are drawn in its place. Controllers sample on their own and meet once
a wave, to count.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from gcore_controller.collectives.base import Collectives
from gcore_controller.context import Context, StageTimer
from gcore_controller.prompts import PromptLoader, SharedPrompts
from gcore_controller.rlhf.modality import (
    GroupT,
    Indexed,
    Modality,
    PromptT,
    RLHFConfig,
    RolesT,
    TrainingBatch,
    UnfinishedGroup,
    Wave,
)
from gcore_controller.trainer_group import State

IndexedT = TypeVar("IndexedT", bound=Indexed)

SampleWave = Callable[[int], Awaitable[list[IndexedT]]]
"""Draw this many prompts on all controllers together, generate and score this controller's share of them; return the
groups worth keeping."""


@dataclass(frozen=True, kw_only=True)
class SampledBatch(Generic[IndexedT]):
    """The result of sampling for one step."""

    groups: list[IndexedT]
    """This controller's part of the step's groups, by prompt index."""
    num_groups: int
    """Groups of the step over all controllers; below the quota only if the waves ran out."""
    num_waves: int
    num_sampled: int
    """Prompts sampled over all controllers."""
    num_kept: int
    """Sampled prompts whose groups carried a signal."""


@dataclass(kw_only=True)
class DynamicSampler(Generic[IndexedT]):
    """Fills a global quota from waves sized by a running estimate of the acceptance rate.

    The groups of a step are those of the lowest prompt indices, so which are chosen depends neither on the number of
    controllers nor on their speed. Groups beyond the quota are the ``surplus``: they are used first in the next step.
    A caller that trains only on samples of the present weights must remove them.
    """

    group: Collectives
    max_waves: int
    """Most waves of a step; after them the step has fewer groups than its quota."""
    surplus: list[IndexedT] = field(default_factory=list[IndexedT])
    acceptance: float = 1.0
    """Running estimate of the share of prompts that carry a signal."""

    async def collect(self, quota: int, sample_wave: SampleWave[IndexedT]) -> SampledBatch[IndexedT]:
        """Collect the groups of a step; every controller must call it with the same quota."""
        mine, self.surplus = self.surplus, []
        indices = await self._all_indices(mine)
        num_waves = num_sampled = num_kept = 0
        while len(indices) < quota and num_waves < self.max_waves:
            # What is missing over the acceptance rate, at most a whole quota.
            wave_sampled = math.ceil(min((quota - len(indices)) / max(self.acceptance, 1e-3), float(quota)))
            mine += await sample_wave(wave_sampled)
            before, indices = len(indices), await self._all_indices(mine)
            num_waves += 1
            num_sampled += wave_sampled
            num_kept += len(indices) - before
            # A wave may also complete groups that were started in an earlier step.
            accepted = min((len(indices) - before) / wave_sampled, 1.0)
            self.acceptance += 0.3 * (accepted - self.acceptance)
        chosen = set(sorted(indices)[:quota])
        mine.sort(key=lambda g: g.prompt_index)
        self.surplus = [g for g in mine if g.prompt_index not in chosen]
        return SampledBatch(
            groups=[g for g in mine if g.prompt_index in chosen],
            num_groups=len(chosen),
            num_waves=num_waves,
            num_sampled=num_sampled,
            num_kept=num_kept,
        )

    async def _all_indices(self, groups: list[IndexedT]) -> list[int]:
        return [i for indices in await self.group.all_gather([g.prompt_index for g in groups]) for i in indices]

    def state(self, encode: Callable[[IndexedT], Any]) -> dict[str, Any]:
        """Return the acceptance estimate and this controller's surplus groups, each encoded by ``encode``."""
        return {"acceptance": self.acceptance, "surplus": [encode(g) for g in self.surplus]}

    def load_state(self, state: dict[str, Any], decode: Callable[[Any], IndexedT]) -> None:
        """Restore `state`."""
        self.acceptance = state["acceptance"]
        self.surplus = [decode(g) for g in state["surplus"]]


async def exchange(
    groups: Sequence[IndexedT],
    costs: Sequence[float],
    *,
    balance: Callable[[list[float], int], Sequence[Sequence[int]]],
    group: Collectives,
) -> list[IndexedT]:
    """Redistribute all controllers' groups so that each gets about the same cost; see `Modality.balance`.

    The first controller computes the assignment, since all controllers may share one process. Only groups that change
    owners are sent. Returns this controller's new share, by prompt index.
    """
    mine = [(g.prompt_index, cost) for g, cost in zip(groups, costs, strict=True)]
    everyones = sorted(entry for part in await group.all_gather(mine) for entry in part)
    parts = balance([cost for _, cost in everyones], group.world_size) if group.rank == 0 else None
    owner = {everyones[i][0]: rank for rank, part in enumerate(await group.broadcast(parts)) for i in part}
    outgoing: list[list[IndexedT]] = [[] for _ in range(group.world_size)]
    for entry in groups:
        outgoing[owner[entry.prompt_index]].append(entry)
    incoming = await group.all_to_all(outgoing)
    return sorted((g for part in incoming for g in part), key=lambda g: g.prompt_index)


class BatchProducer(Generic[RolesT, PromptT, GroupT]):
    """Produces the training batches of a run; all controllers do so together.

    With the schedule ``sync`` a batch is sampled when it is needed. With ``one_step_off`` one batch is sampled while
    another is trained on, and weights change between batches: each is generated by the weights of the step before the
    last. With ``async`` batches are sampled without a pause, up to ``max_staleness`` ahead, and weights change in the
    middle of samples.

    Args:
        ctx: the controller's; concurrent sampling has collectives and a timer of its own.
        first_step: the first batch is for the step after it.
        state: of the controller, to resume from.
    """

    def __init__(
        self,
        ctx: Context[RolesT],
        modality: Modality[RolesT, PromptT, GroupT, Any, Any],
        config: RLHFConfig,
        *,
        first_step: int,
        state: State | None,
    ) -> None:
        if config.schedule != "sync":
            ctx = replace(ctx, group=ctx.group.channel("sampling"), timer=StageTimer(ctx.clock))
        self._ctx = ctx
        self._modality = modality
        self._config = config
        self._step = first_step
        self._loader = PromptLoader(
            modality.prompts,
            seed=config.shuffle_seed,
            rank=ctx.rank,
            world_size=ctx.world_size,
            num_workers=config.num_workers,
            timer=ctx.timer,
        )
        self._shared = SharedPrompts(self._loader, ctx.group)
        waves = config.max_num_gen_batches if config.filter_groups else 1
        self._sampler = DynamicSampler[GroupT](group=ctx.group, max_waves=waves)
        self._unfinished: Sequence[UnfinishedGroup] = ()
        self._max_staleness = 0 if config.is_on_policy else config.max_staleness
        self._wave_groups: list[GroupT] = []
        self._num_dropped = 0
        # What follows is for sampling ahead.
        self._num_batches = config.total_steps - first_step
        self._sampled: asyncio.Queue[TrainingBatch[GroupT] | Exception] = asyncio.Queue()
        self._capacity = asyncio.Semaphore(config.max_staleness if config.schedule == "async" else 1)
        self._engine = asyncio.Lock()
        self._num_started = 0
        self._num_taken = 0
        self._has_started = asyncio.Condition()
        if state is not None:
            self._loader.load_state(state["loader"])
            self._sampler.load_state(state["sampler"], modality.group_from_state)
            self._unfinished = [modality.unfinished_from_state(g) for g in state.get("unfinished", [])]

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Sample ahead, inside the block."""
        task = asyncio.create_task(self._sample_ahead()) if self._config.schedule != "sync" else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def next(self) -> TrainingBatch[GroupT]:
        """Return the batch of the next step: this controller's even share of it.

        Raises:
            RuntimeError: the engine answered with other weights than those that are trained.
        """
        if self._config.schedule == "sync":
            return await self._sample()
        batch = await self._sampled.get()
        if isinstance(batch, Exception):
            raise batch
        self._capacity.release()
        self._num_taken += 1
        if self._config.schedule == "one_step_off":
            # The next batch starts before the weights change, however soon that is.
            async with self._has_started:
                await self._has_started.wait_for(
                    lambda: self._num_started > self._num_taken or self._num_taken == self._num_batches
                )
        return batch

    def weights_changing(self) -> AbstractAsyncContextManager[Any]:
        """Hold sampling back while the engines receive weights: between two batches, unless the schedule is async."""
        return self._engine if self._config.schedule == "one_step_off" else nullcontext()

    async def _sample_ahead(self) -> None:
        try:
            for _ in range(self._num_batches):
                await self._capacity.acquire()
                async with self.weights_changing():
                    async with self._has_started:
                        self._num_started += 1
                        self._has_started.notify_all()
                    batch = await self._sample()
                self._sampled.put_nowait(replace(batch, spans=self._ctx.timer.drain()))
        except Exception as error:
            self._sampled.put_nowait(error)

    async def _sample(self) -> TrainingBatch[GroupT]:
        """Sample until the step has its groups, and give every controller an even share of them."""
        ctx, modality, sampler = self._ctx, self._modality, self._sampler
        self._step += 1
        self._wave_groups, self._num_dropped = [], 0
        num_surplus = len(sampler.surplus)
        sampler.surplus = [g for g in sampler.surplus if self._is_fresh(g.oldest_version)]
        num_stale = num_surplus - len(sampler.surplus)
        sampled = await sampler.collect(self._config.train_batch_size, self._sample_wave)
        if self._config.is_on_policy:
            self._check_versions(sampled.groups)
            # The next step has other weights.
            num_stale += len(sampler.surplus)
            sampler.surplus = []
        metrics = await self._metrics(sampled, num_stale)
        with ctx.timer.stage("prepare"):
            costs = modality.costs(sampled.groups)
            groups = await exchange(sampled.groups, costs, balance=modality.balance, group=ctx.group)
        state = {
            "loader": self._loader.state(),
            "sampler": sampler.state(lambda group: group.state()),
            "unfinished": [group.state() for group in self._unfinished],
        }
        return TrainingBatch(groups=groups, num_groups=sampled.num_groups, metrics=metrics, state=state)

    async def _sample_wave(self, count: int) -> list[GroupT]:
        """Sample so many prompts over all controllers; return this controller's groups that are worth keeping."""
        ctx, config, step = self._ctx, self._config, self._step
        if config.partial_rollout:
            unfinished: list[tuple[UnfinishedGroup, PromptT]] = []
            for group in self._unfinished:
                is_usable = group.oldest_version is None or self._is_fresh(group.oldest_version)
                kept = group if is_usable else group.restarted()
                unfinished.append((kept, self._loader.row(group.prompt_index)))
            num_unfinished = int(await ctx.group.all_reduce(len(unfinished)))
            prompts = self._loader.take(max(0, math.ceil(count * (1 + config.over_sample_rate)) - num_unfinished))
            quota = math.ceil(count / ctx.world_size)
            wave = Wave(step=step, prompts=prompts, unfinished=unfinished, quota=quota)
            num_prompts = len(unfinished) + len(prompts)
        elif self._modality.takes_prompts(ctx):
            self._shared.open(count)
            wave = Wave(step=step, take=self._shared.take)
            # Any controller may take any prompt; the first one counts them all.
            num_prompts = count if ctx.rank == 0 else 0
        else:
            wave = Wave(step=step, prompts=self._loader.take(count))
            num_prompts = len(wave.prompts)
        generated = await self._modality.generate(ctx, wave)
        self._unfinished = generated.unfinished
        self._wave_groups += generated.groups
        self._num_dropped += num_prompts - len(generated.groups) - len(generated.unfinished)
        return [g for g in generated.groups if g.has_signal] if config.filter_groups else generated.groups

    def _is_fresh(self, version: int) -> bool:
        return 0 <= self._ctx.roles.policy.weight_version - version <= self._max_staleness

    def _check_versions(self, groups: Iterable[GroupT]) -> None:
        present = self._ctx.roles.policy.weight_version
        for group in groups:
            if group.oldest_version != present:
                raise RuntimeError(
                    f"a sample of prompt {group.prompt_index} was generated by weights of version "
                    f"{group.oldest_version}; expected only version {present}, the present one, with "
                    "trainer.schedule 'sync' and without partial rollout"
                )

    async def _metrics(self, sampled: SampledBatch[GroupT], num_stale: int) -> dict[str, float]:
        """Return metrics of what was sampled for this batch, over all controllers, kept or not."""
        # A batch whose groups all come from earlier surpluses has had no wave.
        groups = self._wave_groups if sampled.num_waves else sampled.groups
        oldest = min((g.oldest_version for g in sampled.groups), default=None)
        counts = (len(groups), self._num_dropped, num_stale, len(self._unfinished))
        part = await self._modality.sampled_part(self._ctx, groups)
        versions, all_counts, parts = zip(*await self._ctx.group.all_gather((oldest, counts, part)), strict=True)
        num_scored, num_dropped, num_stale, num_unfinished = map(sum, zip(*all_counts, strict=True))
        acceptance = self._sampler.acceptance
        if sampled.num_waves:
            acceptance = sampled.num_kept / max(num_scored + num_dropped, 1)
        off_policy = {
            "sampling/oldest_version": float(min((version for version in versions if version is not None), default=0)),
            "sampling/dropped_groups": float(num_dropped),
            "sampling/unfinished_groups": float(num_unfinished),
        }
        return {
            "sampling/waves": float(sampled.num_waves),
            "sampling/acceptance": float(acceptance),
            "sampling/groups": float(sampled.num_groups),
            "sampling/stale_groups": float(num_stale),
            "sampling/epoch": self._loader.epoch,
            **({} if self._modality.is_always_on_policy else off_policy),
            **self._modality.sampled_metrics(parts),
        }


def reshard_controller_states(states: Sequence[State], rank: int, world_size: int) -> State:
    """Return one controller's state from those of a run with any number of controllers; each group has one owner."""
    if len(states) == world_size:
        return states[rank]

    def own(groups: Iterable[State]) -> list[State]:
        return sorted(groups, key=lambda g: g["ticket"])[rank::world_size]

    first = states[0]
    surplus = own(group for state in states for group in state["sampler"]["surplus"])
    unfinished = own(group for state in states for group in state.get("unfinished", []))
    return {**first, "sampler": {**first["sampler"], "surplus": surplus}, "unfinished": unfinished}
