"""The half of the loop that samples: waves of prompts until a step has its groups, dealt out evenly."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Generic

from gcore_controller.context import Context
from gcore_controller.dynamic_sampling import DynamicSampler, SampledBatch
from gcore_controller.prompt_stealing import SharedPrompts
from gcore_controller.prompts import PromptLoader
from gcore_controller.rlhf.config import RLHFConfig, State
from gcore_controller.rlhf.exchange import exchange
from gcore_controller.rlhf.modality import GroupT, Modality, PromptT, RolesT, TrainingBatch, UnfinishedGroup, Wave


class BatchProducer(Generic[RolesT, PromptT, GroupT]):
    """Produces one training batch after another; all controllers do so together.

    Args:
        ctx: whose collectives and timer sampling uses.
        modality: what is sampled.
        config: of the loop.
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
        self.ctx = ctx
        self._modality = modality
        self._config = config
        self._step = first_step
        self._loader: PromptLoader[PromptT] = PromptLoader(
            modality.prompts,
            seed=config.shuffle_seed,
            rank=ctx.rank,
            world_size=ctx.world_size,
            num_workers=config.num_workers,
            timer=ctx.timer,
        )
        self._shared = SharedPrompts(self._loader, ctx.group)
        waves = config.max_num_gen_batches if config.filter_groups else 1
        self._sampler: DynamicSampler[GroupT] = DynamicSampler(group=ctx.group, max_waves=waves)
        self._unfinished: Sequence[UnfinishedGroup] = ()
        self._max_staleness = 0 if config.is_on_policy else config.max_staleness
        self._wave_groups: list[GroupT] = []
        self._num_dropped = 0
        if state is not None:
            self._loader.load_state(state["loader"])
            self._sampler.load_state(state["sampler"], modality.group_from_state)
            self._unfinished = [modality.unfinished_from_state(g) for g in state.get("unfinished", [])]

    async def next(self) -> TrainingBatch[GroupT]:
        """Sample until the step has its groups, and give every controller an even share of them.

        Raises:
            RuntimeError: the engine answered with other weights than those that are trained.
        """
        ctx, modality, sampler = self.ctx, self._modality, self._sampler
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
        return TrainingBatch(groups=groups, num_groups=sampled.num_groups, metrics=metrics, state=self._state())

    async def _sample_wave(self, count: int) -> list[GroupT]:
        """Sample so many prompts over all controllers; return this controller's groups that are worth keeping."""
        ctx, config, step = self.ctx, self._config, self._step
        if config.partial_rollout:
            unfinished = [(self._fresh(group), self._loader.row(group.prompt_index)) for group in self._unfinished]
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

    def _fresh(self, group: UnfinishedGroup) -> UnfinishedGroup:
        """Return the group, without its samples if they are too old."""
        version = group.oldest_version
        return group if version is None or self._is_fresh(version) else group.restarted()

    def _is_fresh(self, version: int) -> bool:
        return 0 <= self.ctx.roles.policy.weight_version - version <= self._max_staleness

    def _check_versions(self, groups: Iterable[GroupT]) -> None:
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
        groups = self._wave_groups if sampled.num_waves else sampled.groups
        oldest = min((g.oldest_version for g in sampled.groups), default=None)
        counts = (len(groups), self._num_dropped, num_stale, len(self._unfinished))
        part = await self._modality.sampled_part(self.ctx, groups)
        versions, all_counts, parts = zip(*await self.ctx.group.all_gather((oldest, counts, part)), strict=True)
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

    def _state(self) -> State:
        return {
            "loader": self._loader.state(),
            "sampler": self._sampler.state(lambda group: group.state()),
            "unfinished": [group.state() for group in self._unfinished],
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
