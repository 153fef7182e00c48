"""The half of a controller that makes batches: it samples, scores and shares out, step after step."""

import asyncio
import math
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from gcore_controller import Context, DynamicSampler, Harvest, Span, StageTimer
from gcore_controller.prompt_stealing import SharedPrompts
from gcore_controller.prompts import PromptLoader
from gcore_llm.config import TrainConfig
from gcore_llm.exchange import exchange
from gcore_llm.generate import Generation
from gcore_llm.groups import Group, UnfinishedGroup
from gcore_llm.prompts import Prompt, PromptSets
from gcore_llm.roles import Roles
from gcore_placement import TransformerWorkload
from gcore_rollout import EpisodeEnd, SamplingParams, part_means

State = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a step trains on."""

    share: list[Group]
    """This controller's groups, of about as much simulated work as any other's."""
    num_groups: int
    """Over all controllers."""
    metrics: dict[str, float]
    spans: list[Span]
    """Where the time of its making went, if that was beside the training; otherwise none."""
    state: State
    """Of the sampling, behind it."""


class Sampling:
    """Makes one batch after another; all controllers do so together."""

    def __init__(
        self,
        ctx: Context[Roles],
        config: TrainConfig,
        prompts: PromptSets,
        workload: TransformerWorkload,
        state: State | None,
    ) -> None:
        self._ctx = ctx
        self._config = config
        self._workload = workload
        self._loader: PromptLoader[Prompt] = PromptLoader(
            prompts.train,
            seed=config.data.shuffle_seed,
            rank=ctx.rank,
            world_size=ctx.world_size,
            num_workers=config.data.num_workers,
            timer=ctx.timer,
        )
        self._shared = SharedPrompts(self._loader, ctx.group)
        waves = config.algorithm.max_num_gen_batches if config.algorithm.filter_groups else 1
        self._sampler: DynamicSampler[Group] = DynamicSampler(group=ctx.group, max_waves=waves)
        self._generation = Generation(
            sampler=ctx.roles,
            sampling=SamplingParams(max_tokens=config.data.max_response_length, temperature=config.rollout.temperature),
            n=config.rollout.n,
            seed=config.seed,
            timer=ctx.timer,
            with_greedy=config.algorithm.estimator.needs_greedy,
        )
        self._unfinished: list[UnfinishedGroup] = []
        self._wave_groups: list[Group] = []
        self._num_dropped = self._num_stale = 0
        is_on_policy = config.trainer.schedule == "sync" and not config.rollout.partial_rollout
        self._max_staleness = 0 if is_on_policy else config.rollout.max_staleness
        if state is not None:
            self._unfinished = [UnfinishedGroup.from_state(g) for g in state.get("unfinished", [])]
            self._loader.load_state(state["loader"])
            self._sampler.load_state(state["sampler"], Group.from_state)

    async def next(self) -> Batch:
        """Sample until the step has its groups, and give every controller an even share of the work.

        Raises:
            RuntimeError: the engine answered with other weights than those that are trained.
        """
        self._wave_groups = []
        self._num_dropped = 0
        fresh = [g for g in self._sampler.surplus if self._is_fresh(g.oldest_version)]
        self._num_stale = len(self._sampler.surplus) - len(fresh)
        self._sampler.surplus = fresh
        harvest = await self._sampler.harvest(self._config.data.train_batch_size, self._sample_wave)
        if not self._max_staleness:
            self._check_versions(harvest.groups)
            # The next step has other weights.
            self._num_stale += len(self._sampler.surplus)
            self._sampler.surplus = []
        metrics = await self._metrics(harvest)
        with self._ctx.timer.stage("prepare"):
            share = await exchange(harvest.groups, workload=self._workload, group=self._ctx.group)
        return Batch(share=share, num_groups=harvest.num_groups, metrics=metrics, spans=[], state=self._state())

    async def _sample_wave(self, count: int) -> list[Group]:
        rollout = self._config.rollout
        if rollout.partial_rollout:
            begun = [(self._fresh(group), self._loader.row(group.ticket)) for group in self._unfinished]
            num_begun = int(await self._ctx.group.all_reduce(len(begun)))
            prompts = self._loader.take(max(0, math.ceil(count * (1 + rollout.over_sample_rate)) - num_begun))
            quota = math.ceil(count / self._ctx.world_size)
            generated = await self._generation.run(prompts, begun=begun, quota=quota)
            own_count = len(begun) + len(prompts)
        elif self._ctx.roles.policy_slots is None:
            prompts = self._loader.take(count)
            generated = await self._generation.run(prompts)
            own_count = len(prompts)
        else:
            self._shared.open(count)
            generated = await self._generation.run(take=self._shared.take)
            # It does not matter which controller counts the prompts that any of them took.
            own_count = count if self._ctx.rank == 0 else 0
        groups, self._unfinished = await self._compared(generated.groups), generated.unfinished
        self._wave_groups += groups
        self._num_dropped += own_count - len(groups) - len(self._unfinished)
        return [g for g in groups if g.has_signal] if self._config.algorithm.filter_groups else groups

    async def _compared(self, groups: list[Group]) -> list[Group]:
        """The groups, their responses scored against each other if that is asked for."""
        roles = self._ctx.roles
        if roles.comparison is None:
            return groups
        with self._ctx.timer.stage("reward"):
            return await roles.comparison.run([(g, self._loader.row(g.ticket)) for g in groups], roles.tokenizer)

    def _fresh(self, group: UnfinishedGroup) -> UnfinishedGroup:
        """The group, or nothing but its ticket if it is too old."""
        if group.oldest_version is None or self._is_fresh(group.oldest_version):
            return group
        return UnfinishedGroup(ticket=group.ticket, responses={}, begun=[])

    def _is_fresh(self, version: int) -> bool:
        return self._ctx.roles.policy.weight_version - version <= self._max_staleness

    def _check_versions(self, groups: list[Group]) -> None:
        present = self._ctx.roles.policy.weight_version
        for group in groups:
            if group.oldest_version != present:
                raise RuntimeError(
                    f"a response to prompt {group.ticket} has tokens by weights of version {group.oldest_version}; "
                    f"expected version {present}, the present one, alone: trainer.schedule is 'sync' and "
                    "rollout.partial_rollout is false"
                )

    async def _metrics(self, harvest: Harvest[Group]) -> dict[str, float]:
        """What was sampled for this batch, over all controllers, kept or not."""
        # A batch that was in the surplus of those before it has had no wave.
        groups = self._wave_groups if harvest.num_waves else harvest.groups
        own = np.array(
            [(r.score, r.token_ids.size, r.truncated, g.prompt_ids.size) for g in groups for r in g.responses],
            np.float64,
        ).reshape(-1, 4)
        versions = [g.oldest_version for g in harvest.groups]
        parts = [r.parts for g in groups for r in g.responses if r.parts]
        counts = np.array([len(groups), self._num_dropped, self._num_stale, len(self._unfinished)])
        ends = Counter[str](r.end for g in groups for r in g.responses if r.end is not None)
        everyones = await self._ctx.group.all_gather((own, versions, parts, ends, counts))
        rows = np.concatenate([mine for mine, *_ in everyones])
        oldest = min((v for _, mine, *_ in everyones for v in mine), default=0)
        scored, dropped, stale, unfinished = np.sum([counts for *_, counts in everyones], axis=0).tolist()
        acceptance = harvest.num_kept / max(scored + dropped, 1) if harvest.num_waves else self._sampler.acceptance
        metrics = {
            "sampling/waves": float(harvest.num_waves),
            "sampling/acceptance": acceptance,
            "sampling/groups": float(harvest.num_groups),
            "sampling/oldest_version": float(oldest),
            "sampling/dropped_groups": float(dropped),
            "sampling/stale_groups": float(stale),
            "sampling/unfinished_groups": float(unfinished),
            "sampling/epoch": self._loader.epoch,
        }
        if len(rows):
            scores, lengths, truncated, prompts = rows.T
            metrics |= {
                "critic/score/mean": scores.mean(),
                "critic/score/max": scores.max(),
                "critic/score/min": scores.min(),
                "response_length/mean": lengths.mean(),
                "response_length/max": lengths.max(),
                "response_length/clip_ratio": truncated.mean(),
                "prompt_length/mean": prompts.mean(),
                "perf/total_num_tokens": lengths.sum() + prompts.sum(),
            }
        metrics |= part_means(p for _, _, mine, *_ in everyones for p in mine)
        metrics |= _episode_ends(sum((mine for *_, mine, _ in everyones), start=Counter[str]()))
        return {name: float(value) for name, value in metrics.items()}

    def _state(self) -> State:
        return {
            "loader": self._loader.state(),
            "sampler": self._sampler.state(Group.state),
            "unfinished": [group.state() for group in self._unfinished],
        }


def _episode_ends(ends: Counter[str]) -> dict[str, float]:
    """The shares of episodes that ended in each way; nothing for responses of one turn."""
    total = ends.total()
    return {f"multi_turn/end/{end}": ends[end] / total for end in get_args(EpisodeEnd)} if total else {}


class Batches:
    """The batches of a run, in order; made when they are asked for, or ahead of that, while others are trained on.

    With ``schedule`` one_step_off, one batch is made while another is trained on, and weights change between batches:
    each is by the weights of the step before the last. With async, batches are made without a pause, up to
    ``max_staleness`` ahead, and weights change in the middle of responses.
    """

    def __init__(self, ctx: Context[Roles], config: TrainConfig, *, num_batches: int) -> None:
        self.ctx = ctx
        self._schedule = config.trainer.schedule
        self._num_batches = num_batches
        self._made: asyncio.Queue[Batch | Exception] = asyncio.Queue()
        self._room = asyncio.Semaphore(config.rollout.max_staleness if self._schedule == "async" else 1)
        self._engine = asyncio.Lock()
        self._num_begun = 0
        self._num_taken = 0
        self._has_begun = asyncio.Condition()
        if self._schedule != "sync":
            # What goes on beside the training has its own collectives and its own clockwork.
            self.ctx = replace(ctx, group=ctx.group.channel("sampling"), timer=StageTimer(ctx.clock))

    @asynccontextmanager
    async def made_by(self, sampling: Sampling) -> AsyncGenerator[None]:
        """Have them made, inside the block."""
        self._sampling = sampling
        maker = asyncio.create_task(self._make()) if self._schedule != "sync" else None
        try:
            yield
        finally:
            if maker is not None:
                maker.cancel()
                await asyncio.gather(maker, return_exceptions=True)

    async def next(self) -> Batch:
        """The batch of the next step."""
        if self._schedule == "sync":
            return await self._sampling.next()
        batch = await self._made.get()
        if isinstance(batch, Exception):
            raise batch
        self._room.release()
        self._num_taken += 1
        if self._schedule == "one_step_off":
            # Before the weights change, however soon that is.
            async with self._has_begun:
                await self._has_begun.wait_for(lambda: self._num_begun > self._num_taken or self._is_last)
        return batch

    @property
    def _is_last(self) -> bool:
        return self._num_taken == self._num_batches

    def changing_weights(self) -> AbstractAsyncContextManager[Any]:
        """While the engines get new weights: no batch is half made, unless the schedule is async."""
        return self._engine if self._schedule == "one_step_off" else nullcontext()

    async def _make(self) -> None:
        try:
            for _ in range(self._num_batches):
                await self._room.acquire()
                async with self.changing_weights():
                    async with self._has_begun:
                        self._num_begun += 1
                        self._has_begun.notify_all()
                    batch = await self._sampling.next()
                self._made.put_nowait(replace(batch, spans=self.ctx.timer.drain()))
        except Exception as error:
            self._made.put_nowait(error)
