"""Dynamic sampling, as in DAPO (arXiv 2503.14476, section 3.2) and G-Core (arXiv 2507.22789).

A group whose responses all score alike has no gradient, so other prompts are drawn in its place. Controllers sample on
their own and meet once a wave, to count; then groups change their controller, so that each trains on an even share.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, TypeVar

from gcore_controller.collectives.base import Collectives
from gcore_controller.rlhf.modality import GroupT, PromptGroup

T = TypeVar("T")

SampleWave = Callable[[int], Awaitable[list[GroupT]]]
"""Draw this many prompts on all controllers together, generate and score this controller's share of them; return the
groups worth keeping. The number is 0 or less in one of the ``min_waves`` of a step that has all its groups: it is then
that of groups for the next step, negated."""


@dataclass(frozen=True, kw_only=True)
class SampledBatch(Generic[GroupT]):
    """The result of dynamic sampling for one step."""

    groups: list[GroupT]
    """This controller's part of the step's groups, by prompt index."""
    num_groups: int
    """Groups of the step over all controllers; below the quota only if the waves ran out."""
    num_waves: int
    num_sampled: int
    """Prompts sampled over all controllers."""
    num_kept: int
    """Sampled prompts whose groups carried a signal."""


@dataclass(kw_only=True)
class DynamicSampler(Generic[GroupT]):
    """Fills a global quota from waves sized by a running estimate of the acceptance rate.

    The groups of a step are those by the oldest weights, and among these of the lowest prompt indices: where all are by
    the same weights, which are chosen depends neither on the number of controllers nor on their speed. Groups beyond
    the quota are the ``surplus`` of the next step. A caller that trains only on samples of the present weights must
    remove them.

    Example:
        >>> import asyncio
        >>> from types import SimpleNamespace
        >>> indices = iter(range(100))
        >>> async def sample_wave(count):
        ...     groups = [SimpleNamespace(prompt_index=next(indices), oldest_version=0) for _ in range(count)]
        ...     return [group for group in groups if group.prompt_index % 3]  # those with a signal
        >>> sampler = DynamicSampler(group=InlineCollectives(), max_waves=5)
        >>> batch = asyncio.run(sampler.collect(4, sample_wave))
        >>> [group.prompt_index for group in batch.groups], batch.num_waves, batch.num_sampled
        ([1, 2, 4, 5], 2, 7)
    """

    group: Collectives
    max_waves: int
    """Most waves of a step; after them the step has fewer groups than its quota."""
    surplus: list[GroupT] = field(default_factory=list[GroupT])
    acceptance: float = 1.0
    """Running estimate of the share of prompts that carry a signal."""

    async def collect(
        self, quota: int, sample_wave: SampleWave[GroupT], *, min_waves: int = 0
    ) -> SampledBatch[GroupT]:
        """Collect the groups of a step; every controller must call it with the same quota and number of waves."""
        mine = self.surplus
        self.surplus = []
        places = await gather_all(self.group, [_place(g) for g in mine])
        num_waves = 0
        num_sampled = 0
        num_kept = 0
        while num_waves < min_waves or (len(places) < quota and num_waves < self.max_waves):
            # What is missing over the acceptance rate, at most a whole quota.
            num_missing = quota - len(places)
            if num_missing > 0:
                num_missing /= max(self.acceptance, 1e-3)
            wave_sampled = math.ceil(min(num_missing, float(quota)))
            mine += await sample_wave(wave_sampled)
            num_before = len(places)
            places = await gather_all(self.group, [_place(g) for g in mine])
            num_new = len(places) - num_before
            num_waves += 1
            num_kept += num_new
            if wave_sampled > 0:
                num_sampled += wave_sampled
                # A wave may also complete groups that were started in an earlier step.
                accepted = min(num_new / wave_sampled, 1.0)
                self.acceptance += 0.3 * (accepted - self.acceptance)
        chosen = {index for _, index in sorted(places)[:quota]}
        groups: list[GroupT] = []
        for entry in sorted(mine, key=lambda g: g.prompt_index):
            if entry.prompt_index in chosen:
                groups.append(entry)
            else:
                self.surplus.append(entry)
        return SampledBatch(
            groups=groups,
            num_groups=len(chosen),
            num_waves=num_waves,
            num_sampled=num_sampled,
            num_kept=num_kept,
        )

    def state(self, encode: Callable[[GroupT], Any]) -> dict[str, Any]:
        """Return the acceptance estimate and this controller's surplus groups, each encoded by ``encode``."""
        return {"acceptance": self.acceptance, "surplus": [encode(g) for g in self.surplus]}

    def load_state(self, state: dict[str, Any], decode: Callable[[Any], GroupT]) -> None:
        """Restore `state`."""
        self.acceptance = state["acceptance"]
        self.surplus = [decode(g) for g in state["surplus"]]


async def exchange(
    groups: Sequence[GroupT],
    costs: Sequence[float],
    *,
    balance: Callable[[list[float], int], Sequence[Sequence[int]]],
    group: Collectives,
) -> list[GroupT]:
    """Redistribute all controllers' groups so that each gets about the same cost; see `Modality.balance`.

    The first controller computes the assignment, since all controllers may share one process. Only groups that change
    owners are sent. Returns this controller's new share, by prompt index.
    """
    mine = [(g.prompt_index, cost) for g, cost in zip(groups, costs, strict=True)]
    everyones = sorted(await gather_all(group, mine))
    parts = None
    if group.rank == 0:
        parts = balance([cost for _, cost in everyones], group.world_size)
    owners: dict[int, int] = {}
    for rank, part in enumerate(await group.broadcast(parts)):
        for i in part:
            owners[everyones[i][0]] = rank
    outgoing: list[list[GroupT]] = [[] for _ in range(group.world_size)]
    for entry in groups:
        outgoing[owners[entry.prompt_index]].append(entry)
    incoming = await group.all_to_all(outgoing)
    return sorted(chain.from_iterable(incoming), key=lambda g: g.prompt_index)


async def gather_all(group: Collectives, values: list[T]) -> list[T]:
    """Return the values of all controllers in one list, in rank order."""
    return list(chain.from_iterable(await group.all_gather(values)))


def _place(group: PromptGroup) -> tuple[int, int]:
    """Return what groups are sorted by to be trained on."""
    version = group.oldest_version
    return (-1 if version is None else version), group.prompt_index
