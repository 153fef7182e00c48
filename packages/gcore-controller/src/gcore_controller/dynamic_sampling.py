"""Dynamic sampling: draw prompts in waves until the step has exactly its quota of groups that carry a signal.

DAPO (arXiv 2503.14476, section 3.2) and G-Core (arXiv 2507.22789). A group whose responses all score alike has no
gradient. Controllers sample on their own and meet once a wave, to count.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from gcore_controller.collectives.base import Collectives


class Indexed(Protocol):
    """A group of responses to one prompt."""

    @property
    def prompt_index(self) -> int:
        """Position of the prompt in the global order, unique in the run."""
        ...


GroupT = TypeVar("GroupT", bound=Indexed)

SampleWave = Callable[[int], Awaitable[list[GroupT]]]
"""Draw this many prompts on all controllers together, generate and score this controller's share of them; return the
groups worth keeping."""


@dataclass(frozen=True, kw_only=True)
class SampledBatch(Generic[GroupT]):
    """The result of sampling for one step."""

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

    The groups of a step are those of the lowest prompt indices, so which are chosen depends neither on the number of
    controllers nor on their speed. Groups beyond the quota are the ``surplus``: they are used first in the next step.
    A caller that trains only on samples of the present weights must remove them.

    Args:
        max_waves: most waves of a step; after them the step has fewer groups than its quota.
    """

    group: Collectives
    max_waves: int
    surplus: list[GroupT] = field(default_factory=list[GroupT])
    acceptance: float = 1.0
    """Running estimate of the share of prompts that carry a signal."""

    async def collect(self, quota: int, sample_wave: SampleWave[GroupT]) -> SampledBatch[GroupT]:
        """Collect the groups of a step; every controller must call it with the same quota."""
        mine, self.surplus = self.surplus, []
        indices = await self._all_indices(mine)
        num_waves = num_sampled = num_kept = 0
        while len(indices) < quota and num_waves < self.max_waves:
            wave_sampled = self._wave_size(quota - len(indices), quota)
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

    def _wave_size(self, missing: int, quota: int) -> int:
        """Return the number of prompts: what is missing over the acceptance rate, at most a whole quota."""
        return math.ceil(min(missing / max(self.acceptance, 1e-3), float(quota)))

    async def _all_indices(self, groups: list[GroupT]) -> list[int]:
        return [i for indices in await self.group.all_gather([g.prompt_index for g in groups]) for i in indices]

    def state(self, encode: Callable[[GroupT], Any]) -> dict[str, Any]:
        """Return the acceptance estimate and this controller's surplus groups, each encoded by ``encode``."""
        return {"acceptance": self.acceptance, "surplus": [encode(g) for g in self.surplus]}

    def load_state(self, state: dict[str, Any], decode: Callable[[Any], GroupT]) -> None:
        """Restore `state`."""
        self.acceptance = state["acceptance"]
        self.surplus = [decode(g) for g in state["surplus"]]
