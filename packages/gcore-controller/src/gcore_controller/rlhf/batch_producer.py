"""The half of the loop that samples: prompts in a resumable order, and waves of them until a step has its groups.

Dynamic sampling is that of DAPO (arXiv 2503.14476, section 3.2) and G-Core (arXiv 2507.22789): a group whose responses
all score alike has no gradient, so other prompts are drawn in its place. Controllers sample on their own and meet once
a wave, to count.
"""

import itertools
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import lru_cache, partial
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch.utils import data
from torchdata.nodes import Loader, ParallelMapper, SamplerWrapper

from gcore_controller.collectives.base import Collectives
from gcore_controller.context import Context, StageTimer
from gcore_controller.errors import StateError
from gcore_controller.rlhf.exchange import exchange
from gcore_controller.rlhf.modality import (
    GroupT,
    IndexedT,
    Modality,
    PromptT,
    RLHFConfig,
    RolesT,
    SampledBatch,
    TrainingBatch,
    UnfinishedGroup,
    Wave,
)
from gcore_controller.rlhf.permutation import FeistelPermutation
from gcore_controller.rlhf.rounds import Round, StepRounds
from gcore_controller.trainer_group import State

RowT = TypeVar("RowT")
SampleWave = Callable[[int], Awaitable[list[IndexedT]]]
"""Draw this many prompts on all controllers together, generate and score this controller's share of them; return the
groups worth keeping."""


@lru_cache(maxsize=16)
def permutation(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64] | FeistelPermutation:
    """Return the order of the rows in an epoch; of more than 2**20 rows it is computed entry by entry."""
    if num_rows > 2**20:
        return FeistelPermutation(num_rows, seed=seed, epoch=epoch)
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def _first_index(start: int, rank: int, world_size: int) -> int:
    """Return the first prompt index from ``start`` on that belongs to a controller."""
    return start + (rank - start) % world_size


class ShardedSampler(data.Sampler[int]):
    """Yields one controller's rows in an endless, shuffled order: every ``world_size``-th prompt index.

    Prompt index i stands for entry ``i mod num_rows`` of a permutation of the rows that is drawn for epoch
    ``i // num_rows``. It belongs to controller ``i mod world_size``.
    """

    def __init__(self, num_rows: int, *, seed: int, rank: int, world_size: int, start: int = 0) -> None:
        if num_rows < 1:
            raise ValueError(f"num_rows is {num_rows}; expected at least 1")
        self._num_rows, self._seed = num_rows, seed
        self._indices = partial(itertools.count, _first_index(start, rank, world_size), world_size)

    def row(self, prompt_index: int) -> int:
        """Return the number of the row that a prompt index stands for."""
        epoch, entry = divmod(prompt_index, self._num_rows)
        return int(permutation(self._num_rows, self._seed, epoch)[entry])

    def __iter__(self) -> Iterator[int]:
        return map(self.row, self._indices())


@dataclass(eq=False)
class PromptLoader(Generic[RowT]):
    """Loads one controller's slice of a data set, prefetched by torchdata and resumed from one number.

    ``rows`` are the data set; indexing may be slow (it happens in ``num_workers`` threads, in order). ``seed`` is that
    of the shuffle; a `Mixture` has an order of its own. The ``timer`` times the waits for rows as its stage ``data``.
    """

    rows: Sequence[RowT]
    _: KW_ONLY
    seed: int
    rank: int = 0
    world_size: int = 1
    num_workers: int = 0
    timer: StageTimer = field(default_factory=StageTimer)
    cursor: int = field(default=0, init=False)
    """The first prompt index of the next `take` over all controllers."""

    def __post_init__(self) -> None:
        self._open()

    def _open(self) -> None:
        own = {"rank": self.rank, "world_size": self.world_size, "start": self.cursor}
        self._order = ShardedSampler(len(self.rows), seed=self.seed, **own)
        if order := getattr(self.rows, "order", None):
            self._order.row = order(self.seed)
        node: Any = SamplerWrapper(self._order)
        node = ParallelMapper(node, self.rows.__getitem__, num_workers=self.num_workers, in_order=True)
        self._iterator: Iterator[RowT] = iter(Loader(node))

    def take(self, count: int) -> list[tuple[int, RowT]]:
        """Advance by ``count`` rows over all controllers, and return this controller's, each with its prompt index.

        All controllers together get exactly ``count`` rows, whatever their number: a controller gets none if there are
        fewer rows than controllers.
        """
        first = _first_index(self.cursor, self.rank, self.world_size)
        self.cursor += count
        with self.timer.stage("data"):
            return [(index, next(self._iterator)) for index in range(first, self.cursor, self.world_size)]

    def row(self, prompt_index: int) -> RowT:
        """Return the row that a prompt index stands for."""
        with self.timer.stage("data"):
            return self.rows[self._order.row(prompt_index)]

    @property
    def epoch(self) -> float:
        """Passes over the data set so far."""
        return self.cursor / len(self.rows)

    def state(self) -> dict[str, int]:
        """Return the position in the global order, the same on every controller after the same calls of `take`."""
        return {"cursor": self.cursor, "num_rows": len(self.rows), "seed": self.seed}

    def load_state(self, state: dict[str, int]) -> None:
        """Continue where `state` was taken, with any number of controllers.

        Raises:
            StateError: it was taken on a data set of another size, or another shuffle.
        """
        for name in ("num_rows", "seed"):
            if state[name] != (own := self.state()[name]):
                raise StateError(f"{name} of the saved position is {state[name]}; expected {own}, as this data set has")
        self.cursor = state["cursor"]
        self._open()


class SharedPrompts(Generic[RowT]):
    """Waves of prompts from which a controller takes its own slice first, and then one by one those of others.

    Where response lengths have heavy tails or depend on the prompt, the slowest slice would determine the time of the
    step. The prompts of a wave do not depend on which controllers take them. Every controller opens the same waves, and
    meets the others in a collective between two of them.
    """

    def __init__(self, loader: PromptLoader[RowT], group: Collectives) -> None:
        self._loader = loader
        self._group = group
        # The prompts of a slice are numbered from the first wave on, which starts at this prompt index.
        self._base = loader.cursor
        self._num_earlier = 0
        self._own: list[tuple[int, RowT]] = []
        self._others: list[int] = []

    def open(self, count: int) -> None:
        """Open the next wave, of ``count`` prompts in all slices together."""
        self._num_earlier += len(self._own)
        self._own = self._loader.take(count)
        ranks = range(self._group.world_size)
        self._others = [*ranks[self._group.rank + 1 :], *ranks[: self._group.rank]]

    async def take(self, count: int) -> list[tuple[int, RowT]]:
        """Return at most ``count`` further prompts with their prompt indices; none: the wave is complete.

        A call returns prompts of the own slice or of others, so that a controller can start on its own first.
        """
        _, places = await self._places(self._group.rank, count)
        taken = [self._own[place - self._num_earlier] for place in places]
        if taken:
            return taken
        while len(taken) < count and self._others:
            first, places = await self._places(victim := self._others.pop(0), 1)
            for place in places:
                index = first + place * self._group.world_size
                taken.append((index, self._loader.row(index)))
                self._others.append(victim)
        return taken

    async def _places(self, owner: int, count: int) -> tuple[int, range]:
        """Take numbers of prompts in a slice, up to the end of this wave; return its first prompt index, too."""
        first = _first_index(self._base, owner, self._group.world_size)
        limit = len(range(first, self._loader.cursor, self._group.world_size))
        return first, await self._group.take_tickets(count, counter="prompts", at=owner, limit=limit)


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
    report: InitVar[Callable[[Round], Awaitable[None]] | None] = None
    """Called by the first controller with each wave that another one follows; see `StepRounds`."""

    def __post_init__(
        self, first_step: int, state: State | None, report: Callable[[Round], Awaitable[None]] | None
    ) -> None:
        ctx, modality, config = self.ctx, self.modality, self.config
        self._step = first_step
        self._loader = PromptLoader(
            modality.prompts,
            seed=config.shuffle_seed,
            rank=ctx.rank,
            world_size=ctx.world_size,
            num_workers=config.num_workers,
            timer=ctx.timer,
        )
        waves = config.max_num_gen_batches if config.filter_groups else 1
        self._sampler = DynamicSampler[GroupT](group=ctx.group, max_waves=waves)
        self._unfinished: Sequence[UnfinishedGroup] = ()
        if state is not None:
            self._loader.load_state(state["loader"])
            self._sampler.load_state(state["sampler"], modality.group_from_state)
            self._unfinished = [modality.unfinished_from_state(g) for g in state.get("unfinished", [])]
        self._shared = SharedPrompts(self._loader, ctx.group)
        self._rounds = StepRounds(ctx, report)
        # Whether every trained token must come from the present weights.
        self._is_on_policy = config.schedule == "sync" and not config.partial_rollout
        self._max_staleness = 0 if self._is_on_policy else config.max_staleness
        self._wave_groups: list[GroupT] = []
        self._num_dropped = 0

    async def sample(self) -> TrainingBatch[GroupT]:
        """Sample until the next step has its groups; return this controller's even share of them.

        Raises:
            RuntimeError: the engine answered with other weights than those that are trained.
        """
        modality, sampler, before = self.modality, self._sampler, self._sampler.surplus
        self._step += 1
        self._wave_groups, self._num_dropped = [], 0
        sampler.surplus = [g for g in before if self._is_fresh(g.oldest_version)]
        num_stale = len(before) - len(sampler.surplus)
        sampled = await sampler.collect(self.config.train_batch_size, self._sample_wave)
        if self._is_on_policy:
            self._check_versions(sampled.groups)
            # The next step has other weights.
            num_stale += len(sampler.surplus)
            sampler.surplus = []
        metrics = await self._metrics(sampled, num_stale)
        with self.ctx.timer.stage("prepare"):
            costs = modality.costs(sampled.groups)
            groups = await exchange(sampled.groups, costs, balance=modality.balance, group=self.ctx.group)
        left = [group.state() for group in self._unfinished]
        state = {"loader": self._loader.state(), "sampler": sampler.state(lambda g: g.state()), "unfinished": left}
        filtered = [g for g in self._wave_groups if not g.has_signal] if self.config.filter_groups else ()
        return TrainingBatch(
            groups=groups,
            num_groups=sampled.num_groups,
            metrics=metrics,
            state=state,
            rounds=self._rounds.end_step(),
            filtered=filtered,
        )

    async def _sample_wave(self, count: int) -> list[GroupT]:
        """Sample so many prompts over all controllers; return this controller's groups that are worth keeping."""
        ctx, config = self.ctx, self.config
        await self._rounds.next_wave(count)
        if config.partial_rollout:
            groups = [g if self._is_fresh(g.oldest_version) else g.restarted() for g in self._unfinished]
            unfinished = [(group, self._loader.row(group.prompt_index)) for group in groups]
            num_unfinished = int(await ctx.group.all_reduce(len(unfinished)))
            prompts = self._loader.take(max(0, math.ceil(count * (1 + config.over_sample_rate)) - num_unfinished))
            quota = math.ceil(count / ctx.world_size)
            wave = Wave(step=self._step, prompts=prompts, unfinished=unfinished, quota=quota)
            num_prompts = len(unfinished) + len(prompts)
        elif self.modality.takes_prompts(ctx):
            self._shared.open(count)
            wave = Wave(step=self._step, take=self._shared.take)
            # Any controller may take any prompt; the first one counts them all.
            num_prompts = count if ctx.rank == 0 else 0
        else:
            wave = Wave(step=self._step, prompts=self._loader.take(count))
            num_prompts = len(wave.prompts)
        generated = await self.modality.generate(ctx, wave)
        self._unfinished = generated.unfinished
        self._wave_groups += generated.groups
        self._num_dropped += num_prompts - len(generated.groups) - len(generated.unfinished)
        return [g for g in generated.groups if g.has_signal] if config.filter_groups else generated.groups

    def _is_fresh(self, version: int | None) -> bool:
        """Return whether samples are young enough; None: nothing has been generated yet."""
        return version is None or 0 <= self.ctx.roles.policy.weight_version - version <= self._max_staleness

    def _check_versions(self, groups: list[GroupT]) -> None:
        present = self.ctx.roles.policy.weight_version
        if other := next((g for g in groups if g.oldest_version != present), None):
            raise RuntimeError(
                f"a sample of prompt {other.prompt_index} was generated by weights of version {other.oldest_version}; "
                f"expected only version {present}, the present one, with trainer.schedule 'sync' and without partial "
                "rollout"
            )

    async def _metrics(self, sampled: SampledBatch[GroupT], num_stale: int) -> dict[str, float]:
        """Return metrics of what was sampled for this batch, over all controllers, kept or not."""
        # A batch whose groups all come from earlier surpluses has had no wave.
        groups = self._wave_groups if sampled.num_waves else sampled.groups
        oldest = min((g.oldest_version for g in sampled.groups), default=None)
        counts = (len(groups), self._num_dropped, num_stale, len(self._unfinished))
        part = await self.modality.sampled_part(self.ctx, groups)
        versions, all_counts, parts = zip(*await self.ctx.group.all_gather((oldest, counts, part)), strict=True)
        num_scored, num_dropped, num_stale, num_unfinished = map(sum, zip(*all_counts, strict=True))
        share = sampled.num_kept / max(num_scored + num_dropped, 1)
        metrics = {
            "sampling/waves": float(sampled.num_waves),
            "sampling/acceptance": float(share if sampled.num_waves else self._sampler.acceptance),
            "sampling/groups": float(sampled.num_groups),
            "sampling/stale_groups": float(num_stale),
            "sampling/epoch": self._loader.epoch,
        }
        if not self.modality.is_always_on_policy:
            metrics["sampling/oldest_version"] = float(min((v for v in versions if v is not None), default=0))
            metrics["sampling/dropped_groups"] = float(num_dropped)
            metrics["sampling/unfinished_groups"] = float(num_unfinished)
        return metrics | self.modality.sampled_metrics(parts)
