"""Options of `gcore-bench placement`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

from gcore_bench.harness.options import BenchError, Count, NonNegative, QuickOptions, at_least
from gcore_runs import Bound

PartName = Literal["balancer", "planner", "oracles", "live", "study", "sweep"]
Counts = Literal["free", "equal", "close"]
Lengths = Literal["lognormal", "pareto"]
LiveStrategy = Literal["split", "colocated", "static", "even", "dynamic"]
LIVE_STRATEGIES: tuple[LiveStrategy, ...] = ("split", "colocated", "static", "dynamic")
"""All but even, which static has."""
StudyDevices = Annotated[int, Bound(lambda devices: devices in (64, 512, 10_000), "one of 64, 512 and 10000")]
SweepDevices = Annotated[int, Bound(lambda devices: devices in (37, 64, 512), "one of 37, 64 and 512")]
_NonNegativeFloat = Annotated[float, at_least(0)]


@dataclass(frozen=True, kw_only=True)
class PlacementOptions(QuickOptions):
    """Measure gcore-placement: how evenly and quickly it divides sequences, and how well its planner predicts."""

    parts: tuple[PartName, ...] = ("balancer", "planner", "oracles", "live")
    """balancer: sequences over ranks, by simulated work, compared with verl and random; planner: seconds and memory of
    small runs, predicted by laws fitted to others; oracles: steps that other systems have published, predicted; live:
    runs on Ray whose load drifts, under each placement; study: simulations that answer the open questions of
    gcore-placement's docs; sweep: simulations of loads that swing, jump, drift and are noisy."""
    samples: tuple[Count, ...] = (512, 4096, 16_384, 100_352, 1_000_448)
    """Sequences of a batch: multiples of each number of ranks."""
    ranks: tuple[Count, ...] = (8, 64, 512)
    """Ranks that share the sequences."""
    counts: tuple[Counts, ...] = get_args(Counts)
    """free: only the work is balanced; equal: all ranks get the same number of sequences; close: as equal, and
    gcore-placement may end within ``tolerance`` of the mean."""
    tolerance: _NonNegativeFloat = 1e-3
    """Tolerance of close."""
    lengths: tuple[Lengths, ...] = get_args(Lengths)
    """Distribution of response lengths: lognormal, or with the heavier tail of a Pareto law."""
    verl_s: _NonNegativeFloat = 240.0
    """Most CPU seconds of verl: where its time for the next smaller batch predicts more, it is left out."""
    steps: Count = 3
    """Steps of each run of the planner in a round."""
    live_strategies: tuple[LiveStrategy, ...] = LIVE_STRATEGIES
    """Placements of live runs. split: half of the devices train, the others generate and judge; all have one role.
    In the others, all devices train while all engines sleep; before, colocated: all generate, then all judge; static: a
    run for every partition of the devices into those that generate and those that judge; even: the even one of these
    alone; dynamic: the partition follows the load."""
    live_judges: Annotated[int, Bound(lambda count: count in (1, 2), "1 or 2")] = 1
    """Judges of a live run. With 2, the load goes from the policy to the first judge, and to the second."""
    live_devices: Annotated[int, at_least(3)] = 4
    """Devices of a live run."""
    live_phase_steps: Count = 5
    """Steps of each of its three phases: judging takes most, then generation, then judging again."""
    live_batch: Count = 8
    """Prompts of a step, each with four responses; about half of what is sampled has no signal and is replaced."""
    live_step_ms: _NonNegativeFloat = 32.0
    """Least milliseconds of a decoding step of its engines, so that a few cores can stand for many devices."""
    live_train_ms: _NonNegativeFloat = 8.0
    """Milliseconds for which a training rank waits for each token that it trains on, for the same reason."""
    live_swap_ms: _NonNegativeFloat = 1000.0
    """Milliseconds in which an engine of a live run goes to sleep, and in which it wakes: a device's change from one
    model to another is one of each."""
    study_folder: Annotated[
        Path, Bound(lambda path: path.absolute().parent.is_dir(), "a path in an existing folder")
    ] = Path("study")
    """Folder for the study's tables.md and study.html, and the sweep's sweep.md."""
    study_devices: tuple[StudyDevices, ...] = (64, 512, 10_000)
    """Devices on which the study simulates loads that drift."""
    study_steps: NonNegative = 0
    """Most steps of each simulation of the study and of the sweep; 0: as many as it has."""
    study_processes: NonNegative = 0
    """Processes of the study and of the sweep; 0: as many as there are cores."""
    sweep_devices: tuple[SweepDevices, ...] = (37, 64, 512)
    """Devices on which the sweep simulates each load."""
    sweep_traces: tuple[str, ...] = ()
    """Names of the sweep's loads in the family; none: all."""
    sweep_seeds: Count = 1
    """Seeds of each load in the sweep."""
    seed: NonNegative = 0
    """Seed of lengths, deals and models."""

    QUICK: ClassVar[Mapping[str, Any]] = {
        "samples": (64, 512),
        "ranks": (4, 8),
        "rounds": 1,
        "steps": 1,
        "live_devices": 3,
        "live_phase_steps": 1,
        "live_batch": 4,
        "live_step_ms": 1.0,
        "live_train_ms": 0.1,
        "live_swap_ms": 20.0,
        "study_steps": 2,
        "study_devices": (64,),
        "sweep_devices": (37,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for samples, ranks in product(self.samples, self.ranks):
            if samples % ranks:
                raise BenchError(f"samples holds {samples}; expected multiples of {ranks}, a number of ranks")

    @property
    def num_study_processes(self) -> int:
        """Processes of the study and of the sweep."""
        return self.study_processes or os.cpu_count() or 1
