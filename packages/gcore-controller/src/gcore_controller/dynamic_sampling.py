"""Dynamic sampling: draw prompts in waves until the step has exactly its quota of groups that carry a signal.

DAPO (arXiv 2503.14476, section 3.2) and G-Core (arXiv 2507.22789). A group whose responses all score alike has no
gradient. Controllers sample on their own and meet once a wave, to count.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from gcore_controller.collectives.base import Collectives


class Ticketed(Protocol):
    """A group of responses to the prompt with this ticket."""

    @property
    def ticket(self) -> int:
        """Place of the prompt in the global order, unique in the run."""
        ...


GroupT = TypeVar("GroupT", bound=Ticketed)

SampleWave = Callable[[int], Awaitable[list[GroupT]]]
"""Draw this many prompts on all controllers together, generate and score this controller's share of them; return the
groups worth keeping."""


@dataclass(frozen=True, kw_only=True)
class Harvest(Generic[GroupT]):
    """What one step's sampling gave."""

    groups: list[GroupT]
    """This controller's share of the step's groups, by ticket."""
    num_groups: int
    """Groups of the step over all controllers; below the quota only if the waves ran out."""
    num_waves: int
    num_sampled: int
    """Prompts sampled over all controllers."""
    num_kept: int
    """Those of them that carried a signal."""


@dataclass(kw_only=True)
class DynamicSampler(Generic[GroupT]):
    """Fills a global quota from waves sized by a running estimate of the acceptance rate.

    The groups of a step are the oldest by ticket, so which are chosen does not depend on how many controllers there
    are or who is fast. Groups beyond the quota are the ``surplus``: they are used first in the next step, unless the
    caller removes them, which a caller must that trains on samples of the present weights alone.

    Args:
        max_waves: most waves a step may take; then it makes do with what it has.
    """

    group: Collectives
    max_waves: int
    surplus: list[GroupT] = field(default_factory=list[GroupT])
    acceptance: float = 1.0
    """Running estimate of the share of prompts that carry a signal."""

    async def harvest(self, quota: int, sample_wave: SampleWave[GroupT]) -> Harvest[GroupT]:
        """Collect the step's groups; every controller must call it with the same quota."""
        mine, self.surplus = self.surplus, []
        tickets = await self._all_tickets(mine)
        num_waves = num_sampled = num_kept = 0
        while len(tickets) < quota and num_waves < self.max_waves:
            wave_sampled = self._wave_size(quota - len(tickets), quota)
            mine += await sample_wave(wave_sampled)
            before, tickets = len(tickets), await self._all_tickets(mine)
            num_waves += 1
            num_sampled += wave_sampled
            num_kept += len(tickets) - before
            # Groups that were started in an earlier step may come on top of those of the wave.
            accepted = min((len(tickets) - before) / wave_sampled, 1.0)
            self.acceptance += 0.3 * (accepted - self.acceptance)
        chosen = set(sorted(tickets)[:quota])
        mine.sort(key=lambda g: g.ticket)
        self.surplus = [g for g in mine if g.ticket not in chosen]
        return Harvest(
            groups=[g for g in mine if g.ticket in chosen],
            num_groups=len(chosen),
            num_waves=num_waves,
            num_sampled=num_sampled,
            num_kept=num_kept,
        )

    def _wave_size(self, missing: int, quota: int) -> int:
        """Return the number of prompts: what is missing over the acceptance rate, at most a whole quota."""
        return math.ceil(min(missing / max(self.acceptance, 1e-3), float(quota)))

    async def _all_tickets(self, groups: list[GroupT]) -> list[int]:
        return [t for tickets in await self.group.all_gather([g.ticket for g in groups]) for t in tickets]

    def state(self, encode: Callable[[GroupT], Any]) -> dict[str, Any]:
        """The acceptance estimate and this controller's surplus groups, each as ``encode`` gives it."""
        return {"acceptance": self.acceptance, "surplus": [encode(g) for g in self.surplus]}

    def load_state(self, state: dict[str, Any], decode: Callable[[Any], GroupT]) -> None:
        self.acceptance = state["acceptance"]
        self.surplus = [decode(g) for g in state["surplus"]]
