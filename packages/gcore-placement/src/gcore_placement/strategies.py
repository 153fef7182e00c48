"""The placement strategies, declared once: how generation and reward share the devices of a job.

A new strategy is an entry here, and a method of `gcore_placement.simulation.simulator.Simulator`.
"""

from dataclasses import dataclass
from typing import Literal

Strategy = Literal["colocated", "split", "dynamic", "auto"]


@dataclass(frozen=True, kw_only=True)
class StrategyTraits:
    """The properties of a strategy."""

    is_time_shared: bool
    """Generation and reward take turns on all devices; otherwise each has a part of them."""
    follows_load: bool
    """Devices move between the roles as their load changes."""
    is_planned: bool = True
    """Plans choose among it; otherwise a run chooses among other strategies while it runs."""
    is_live: bool = False
    """Auto chooses it, or another such one, after each step."""


STRATEGIES: dict[Strategy, StrategyTraits] = {
    "colocated": StrategyTraits(is_time_shared=True, follows_load=False, is_live=True),
    "split": StrategyTraits(is_time_shared=False, follows_load=False),
    "dynamic": StrategyTraits(is_time_shared=False, follows_load=True, is_live=True),
    "auto": StrategyTraits(is_time_shared=False, follows_load=True, is_planned=False),
}

PLANNED: tuple[Strategy, ...] = tuple(
    name for name, traits in STRATEGIES.items() if traits.is_planned
)
