"""The half of the loop that samples: waves of prompts until a step has its groups."""

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from typing import Any, Generic

from gcore_controller.context import Context, DeviceWork
from gcore_controller.rlhf.curriculum import Curriculum
from gcore_controller.rlhf.dynamic_sampling import (
    DynamicSampler,
    SampledBatch,
    exchange,
    gather_all,
)
from gcore_controller.rlhf.events import Round
from gcore_controller.rlhf.modality import (
    Generated,
    GroupT,
    Modality,
    PromptT,
    RLHFConfig,
    RolesT,
    TrainingBatch,
    Wave,
)
from gcore_controller.rlhf.prompts import PromptLoader, SharedPrompts
from gcore_controller.rlhf.tail_batching import TailBatching
from gcore_controller.trainer_group import State


@dataclass(eq=False)
class BatchProducer(Generic[RolesT, PromptT, GroupT]):
    """Samples the training batches of a run; all controllers do so together."""

    ctx: Context[RolesT]
    modality: Modality[RolesT, PromptT, GroupT, Any, Any]
    config: RLHFConfig
    _: KW_ONLY
    first_step: InitVar[int]
    """The first batch is for the step after it."""
    state: InitVar[State | None]
    """State of the controller to resume from."""
    report: Callable[[Round], Awaitable[None]] | None = None
    """Called by the first controller with each wave that another one follows in its step, which starts on all
    controllers when this has returned; None: each step is one round."""

    def __post_init__(self, first_step: int, state: State | None) -> None:
        ctx = self.ctx
        modality = self.modality
        config = self.config
        self._step = first_step
        self._curriculum = Curriculum(config.shuffle_seed) if config.curriculum else None
        self._loader = PromptLoader(
            modality.prompts,
            seed=config.shuffle_seed,
            rank=ctx.rank,
            world_size=ctx.world_size,
            num_workers=config.num_workers,
            timer=ctx.timer,
            curriculum=self._curriculum,
        )
        waves = config.max_num_gen_batches if config.filter_groups else None
        self._tail = None
        if config.tail_batching:
            if config.schedule != "sync" or config.partial_rollout:
                raise ValueError(
                    f"schedule is {config.schedule!r} and partial_rollout {config.partial_rollout} with tail_batching; "
                    "expected 'sync' and False, by which deferred prompts are sampled again by the present weights"
                )
            self._tail = TailBatching(
                quota=config.train_batch_size,
                over_sample_rate=config.over_sample_rate,
                max_length=config.short_length,
                max_waves=waves,
            )
            waves = self._tail.max_waves
        self._sampler = DynamicSampler[GroupT](group=ctx.group, max_waves=waves or 1)
        self._unfinished: Sequence[GroupT] = ()
        if state is not None:
            self._loader.load_state(state["loader"])
            self._sampler.load_state(state["sampler"], modality.group_from_state)
            self._unfinished = [modality.group_from_state(g) for g in state.get("unfinished", [])]
            if self._tail is not None:
                self._tail.load_state(state["tail"])
            if self._curriculum is not None and state.get("curriculum"):
                self._curriculum.load_state(state["curriculum"])
        self._shared = SharedPrompts(self._loader, ctx.group)
        self._reported: list[Round] = []
        """The waves of the step that were reported."""
        self._num_prompts = 0
        """Prompts that were sampled since then, over all controllers."""
        # Whether every trained token must come from the present weights.
        self._is_on_policy = config.schedule == "sync" and not config.partial_rollout
        self._max_staleness = 0 if self._is_on_policy else config.max_staleness
        self._first_version: int | None = None
        """The engine's number of the weights before the run's first step; None: nothing has been sampled yet."""
        self._wave_groups: list[GroupT] = []
        self._num_dropped = 0

    async def sample(self) -> TrainingBatch[GroupT]:
        """Sample until the next step has its groups; return this controller's even share of them.

        Raises:
            RuntimeError: the engine answered with other weights than those that are trained.
        """
        ctx = self.ctx
        modality = self.modality
        sampler = self._sampler
        self._step += 1
        self._wave_groups = []
        self._num_dropped = 0
        if self._first_version is None:
            self._first_version = ctx.roles.policy.weight_version - (self._step - 1)
        num_stale = 0 if self._is_on_policy else await self._drop_stale()
        if self._tail is not None:
            self._tail.start()
        # Groups that are too old for the next batch have to end even if this one is complete.
        min_waves = int(self.config.partial_rollout == "wait")
        sampled = await sampler.collect(
            self.config.train_batch_size, self._sample_wave, min_waves=min_waves
        )
        if self._is_on_policy:
            self._check_versions(sampled.groups)
            # The next step has other weights.
            if self._tail is not None:
                surplus = [group.prompt_index for group in sampler.surplus]
                self._tail.finish(await gather_all(ctx.group, surplus))
            else:
                num_stale += len(sampler.surplus)
            sampler.surplus = []
        metrics = await self._metrics(sampled, num_stale)
        if self._curriculum is not None:
            scores = [
                (self._loader.locate(group.prompt_index), list(map(float, group.scores)))
                for group in self._wave_groups
            ]
            self._curriculum.record(sorted(await gather_all(ctx.group, scores)))
            metrics |= self._curriculum.metrics()
        with ctx.timer.stage("prepare"):
            costs = modality.costs(sampled.groups)
            groups = await exchange(
                sampled.groups, costs, balance=modality.balance, group=ctx.group
            )
        unfinished = [group.state() for group in self._unfinished]
        state = {
            "loader": self._loader.state(),
            "sampler": sampler.state(lambda g: g.state()),
            "unfinished": unfinished,
        }
        if self._tail is not None:
            state["tail"] = self._tail.state()
        if ctx.rank == 0:
            state |= modality.sampling_state()
            if self._curriculum is not None:
                state["curriculum"] = self._curriculum.state()
        filtered: list[GroupT] = []
        if self.config.filter_groups:
            filtered = [g for g in self._wave_groups if not g.has_signal]
        rounds = [*self._reported, self._make_round(DeviceWork())]
        self._reported = []
        self._num_prompts = 0
        return TrainingBatch(
            groups=groups,
            num_groups=sampled.num_groups,
            metrics=metrics,
            state=state,
            rounds=rounds,
            filtered=filtered,
        )

    async def _sample_wave(self, count: int) -> list[GroupT]:
        """Sample so many prompts over all controllers; return this controller's groups that are worth keeping."""
        ctx = self.ctx
        config = self.config
        num_drawn = count
        max_length = None
        if self._tail is not None:
            again, num_new, max_length = self._tail.next_wave(count)
            self._loader.give_back(again)
            num_drawn = len(again) + num_new
        if self.report is not None and self._num_prompts:
            await self._report_wave(self.report)
        self._num_prompts += num_drawn
        if config.partial_rollout:
            generated, num_prompts = await self._continue_groups(count)
        else:
            prompts = self._loader.take(num_drawn)
            num_prompts = len(prompts)
            wave = Wave(step=self._step, prompts=prompts, max_length=max_length)
            if self.modality.takes_prompts(ctx):
                prompts.sort(key=lambda entry: -self.modality.expected_work(entry[1]))
                await self._shared.open(prompts)
                wave = replace(wave, prompts=(), take=self._shared.take)
            generated = await self.modality.generate(ctx, wave)
        self._unfinished = generated.unfinished
        self._wave_groups += generated.groups
        # Controllers may have taken prompts from others: the numbers are right over all of them.
        self._num_dropped += num_prompts
        self._num_dropped -= len(generated.groups) + len(generated.unfinished)
        self._num_dropped -= len(generated.deferred)
        if self._tail is not None:
            longest = [self.modality.longest(group) for group in generated.groups]
            deferred: list[int] = []
            lengths: list[int] = []
            parts = await ctx.group.all_gather((generated.deferred, longest))
            for rank_deferred, rank_lengths in parts:
                deferred.extend(rank_deferred)
                lengths.extend(rank_lengths)
            self._tail.record_wave(deferred, lengths)
        if not config.filter_groups:
            return generated.groups
        return [g for g in generated.groups if g.has_signal]

    async def _report_wave(self, report: Callable[[Round], Awaitable[None]]) -> None:
        """Report the wave that the next one follows, on all controllers together."""
        group = self.ctx.group
        parts = await group.all_gather(self.ctx.roles.devices.drain())
        self._reported.append(self._make_round(DeviceWork.merge(parts)))
        self._num_prompts = 0
        if group.rank == 0:
            await report(self._reported[-1])
        await group.barrier()

    def _make_round(self, work: DeviceWork) -> Round:
        return Round(number=1 + len(self._reported), num_prompts=self._num_prompts, work=work)

    async def _continue_groups(self, count: int) -> tuple[Generated[GroupT], int]:
        """Continue unfinished groups, and start others, until ``count`` groups over all controllers are complete.

        A prompt starts when the engine has capacity for it. Returns the number of this controller's prompts, too.
        """
        group = self.ctx.group
        unfinished = [(entry, self._loader.row(entry.prompt_index)) for entry in self._unfinished]
        num_unfinished = int(await group.all_reduce(len(unfinished)))
        num_draws = 0
        drawn: list[tuple[int, PromptT]] = []
        started: list[tuple[int, PromptT]] = []

        async def take(num_wanted: int) -> Sequence[tuple[int, PromptT]]:
            nonlocal num_draws
            num_startable = self._num_usable(count) - num_unfinished
            num_allowed = len(range(group.rank, num_startable, group.world_size))
            num_new = max(0, min(num_wanted, num_allowed - len(started)))
            while len(drawn) < num_new:
                # This controller's next one in the order of all.
                drawn.extend(self._loader.take(group.world_size))
                num_draws += 1
            prompts = drawn[:num_new]
            del drawn[:num_new]
            started.extend(prompts)
            return prompts

        wave = Wave[PromptT](
            step=self._step,
            unfinished=unfinished,
            quota=max(0, math.ceil(count / group.world_size)),
            take=take,
            may_stop=self._are_in_time if self.config.partial_rollout == "wait" else None,
        )
        generated = await self.modality.generate(self.ctx, wave)
        # Others may have taken more of theirs.
        most = max(await group.all_gather(num_draws))
        drawn += self._loader.take((most - num_draws) * group.world_size)
        self._loader.give_back(await gather_all(group, [index for index, _ in drawn]))
        return generated, len(unfinished) + len(started)

    @property
    def _version_of_use(self) -> int:
        """The version of the weights that the batch in the making is to change."""
        assert self._first_version is not None
        return self._first_version + self._step - 1

    @property
    def _oldest_allowed(self) -> int:
        return self._version_of_use - self._max_staleness

    def _num_usable(self, count: int) -> int:
        """Return how many groups can be trained on: ``count`` in this step, and others while they are young enough.

        With "wait" these are the groups of all steps that the present weights are young enough for. Where sampling
        pauses after the step, they are not more than `over_sample_rate` says.
        """
        config = self.config
        num_later = self._max_staleness
        if config.partial_rollout == "wait":
            num_later = self.ctx.roles.policy.weight_version - self._oldest_allowed
        num_usable = count + num_later * config.train_batch_size
        if config.schedule == "async":
            return num_usable
        return min(num_usable, math.ceil(count * (1 + config.over_sample_rate)))

    def _are_in_time(self, versions: Sequence[int]) -> bool:
        """Return whether groups that started with these versions can wait for later batches.

        Each later batch takes this controller's share of it, those by the oldest weights first.
        """
        share = self.config.train_batch_size / self.ctx.world_size
        for position, version in enumerate(sorted(versions)):
            if version - self._oldest_allowed <= position // share:
                return False
        return True

    def _is_stale(self, group: GroupT) -> bool:
        """Return whether a group is too old for the next batch, or by weights of a run that went further."""
        version = group.oldest_version
        if version is None:
            return False
        return not self._oldest_allowed <= version <= self.ctx.roles.policy.weight_version

    async def _drop_stale(self) -> int:
        """Drop groups that are too old for the next batch, to sample their prompts again; return how many were here."""
        surplus = self._sampler.surplus
        stale = [group for group in (*surplus, *self._unfinished) if self._is_stale(group)]
        self._sampler.surplus = [group for group in surplus if not self._is_stale(group)]
        self._unfinished = [group for group in self._unfinished if not self._is_stale(group)]
        for group in stale:
            self.modality.drop(group)
        indices = [group.prompt_index for group in stale]
        self._loader.give_back(await gather_all(self.ctx.group, indices))
        return len(stale)

    def _check_versions(self, groups: list[GroupT]) -> None:
        present = self.ctx.roles.policy.weight_version
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
        groups = self._wave_groups if sampled.num_sampled else sampled.groups
        counts = Counter(
            scored=len(groups),
            dropped=self._num_dropped,
            stale=num_stale,
            unfinished=len(self._unfinished),
        )
        part = await self.modality.sampled_part(self.ctx, groups)
        versions = Counter(g.oldest_version for g in sampled.groups if g.oldest_version is not None)
        all_counts: Counter[str] = Counter()
        all_versions: Counter[int] = Counter()
        parts: list[Any] = []
        everyones = await self.ctx.group.all_gather((versions, counts, part))
        for rank_versions, rank_counts, rank_part in everyones:
            all_versions.update(rank_versions)
            all_counts.update(rank_counts)
            parts.append(rank_part)
        acceptance = self._sampler.acceptance
        if sampled.num_sampled:
            acceptance = sampled.num_kept / max(all_counts["scored"] + all_counts["dropped"], 1)
        metrics = {
            "sampling/waves": float(sampled.num_waves),
            "sampling/acceptance": acceptance,
            "sampling/groups": float(sampled.num_groups),
            "sampling/stale_groups": float(all_counts["stale"]),
            "sampling/epoch": self._loader.epoch,
        }
        if not self.modality.is_always_on_policy:
            metrics["sampling/oldest_version"] = float(min(all_versions, default=0))
            metrics["sampling/dropped_groups"] = float(all_counts["dropped"])
            metrics["sampling/unfinished_groups"] = float(all_counts["unfinished"])
        if self.config.schedule != "sync":
            metrics |= self._age_metrics(all_versions)
        if self._tail is not None:
            metrics |= self._tail.metrics()
        return metrics | self.modality.sampled_metrics(parts)

    def _age_metrics(self, versions: Counter[int]) -> dict[str, float]:
        """Return the distribution of ages, from the number of groups by their oldest version."""
        ages = [self._version_of_use - version for version in versions.elements()]
        if not ages:
            return {}
        metrics = {
            "sampling/age/mean": sum(ages) / len(ages),
            "sampling/age/max": float(max(ages)),
        }
        for age, count in sorted(Counter(ages).items()):
            metrics[f"sampling/age/share/{age}"] = count / len(ages)
        return metrics
