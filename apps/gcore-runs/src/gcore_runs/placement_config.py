"""Settings of which of a cluster's engines generate and which judge."""

from dataclasses import dataclass

from gcore_placement import Strategy
from gcore_runs.errors import check_at_least


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """How the engines of a run on ray are divided between the policy and a judge; all ranks train."""

    strategy: Strategy = "split"
    """split: rollout.num-processes engines generate, reward-model.judge.num-processes judge. dynamic: so many at first;
    then, between steps, an engine at a time moves from the role that idles to the one that is busy, more at once where
    the load has jumped, as long as that saves more than it costs. colocated: each of rollout.num-processes devices has
    an engine of both, and all generate, then all judge; the engines that wait are asleep. auto: dynamic, or colocated
    where that takes less, swaps included."""
    horizon_steps: int = 20
    """Steps over which a move must save more time than it takes; how long moves take is measured."""

    def __post_init__(self) -> None:
        check_at_least("placement.horizon_steps", self.horizon_steps, 1)
