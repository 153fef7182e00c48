"""Options of `gcore-bench placement`."""

from dataclasses import dataclass
from typing import Literal

from gcore_bench.harness.report import BenchOptions
from gcore_runs import NonNegative

PartName = Literal["balancer", "planner", "oracles", "live", "study"]


@dataclass(frozen=True, kw_only=True)
class PlacementOptions(BenchOptions):
    """Measure gcore-placement: how evenly and quickly it divides sequences, and how well its planner predicts."""

    parts: tuple[PartName, ...] = ("balancer", "planner", "oracles", "live")
    """balancer: sequences over ranks, by simulated work, compared with verl and random; planner: seconds and memory of
    small runs, predicted by laws fitted to others; oracles: steps that other systems have published, predicted; live:
    runs on Ray whose load drifts, under each placement; study: simulations that answer the open questions of
    gcore-placement's docs."""
    seed: NonNegative = 0
    """Seed of the lengths of sequences and of the weights of models."""
