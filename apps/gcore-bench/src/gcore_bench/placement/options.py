"""Options of `gcore-bench placement`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self, get_args

from gcore_bench.harness.errors import BenchError

PartName = Literal["balancer", "planner", "live", "study"]
Counts = Literal["free", "equal", "close"]
Lengths = Literal["lognormal", "pareto"]


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """Measure gcore-placement: how evenly and quickly it divides sequences, and how well its planner predicts."""

    parts: tuple[PartName, ...] = ("balancer", "planner", "live")
    """balancer: sequences over ranks, by simulated work, compared with verl and random; planner: seconds and memory of
    small runs, predicted by laws fitted to others; live: runs on Ray whose load drifts, under each strategy; study:
    simulations that answer the open questions of gcore-placement's docs."""
    samples: tuple[int, ...] = (512, 4096, 16_384, 100_352, 1_000_448)
    """Sequences of a batch: multiples of each number of ranks."""
    ranks: tuple[int, ...] = (8, 64, 512)
    """Ranks that share the sequences."""
    counts: tuple[Counts, ...] = get_args(Counts)
    """free: only the work is balanced; equal: all ranks get the same number of sequences; close: as equal, and
    gcore-placement may end within ``tolerance`` of the mean."""
    tolerance: float = 1e-3
    """Tolerance of close."""
    lengths: tuple[Lengths, ...] = get_args(Lengths)
    """Distribution of response lengths: lognormal, or with the heavier tail of a Pareto law."""
    verl_s: float = 240.0
    """Most CPU seconds of verl: where its time for the next smaller batch predicts more, it is left out."""
    rounds: int = 3
    """Measurements of each run of the planner."""
    steps: int = 3
    """Steps of each run in a round."""
    live_devices: int = 4
    """Devices that engines and judges of a live run share."""
    live_phase_steps: int = 6
    """Steps of each of its three phases: judging takes most, then generation, then judging again."""
    live_batch: int = 32
    """Prompts of a step, each with four responses: several times what engines run at once, as in large runs."""
    live_step_ms: float = 16.0
    """Least milliseconds of a decoding step of its engines, so that a few cores can stand for many devices."""
    live_swap_ms: float = 1000.0
    """Milliseconds in which an engine of a live run goes to sleep, and in which it wakes."""
    study_folder: Path = Path("study")
    """Folder for the study's tables.md and study.html."""
    study_steps: int = 0
    """Most steps of each simulation of the study; 0: as many as it has, half an hour or so on two cores."""
    study_processes: int = 0
    """Processes of the study; 0: as many as there are cores."""
    seed: int = 0
    """Seed of lengths, deals and models."""
    quick: bool = False
    """Small batches and models, and one round, to check that the bench runs."""
    json: Path | None = None
    """File to write all figures to."""

    def __post_init__(self) -> None:
        for name in ("parts", "samples", "ranks", "counts", "lengths"):
            values = getattr(self, name)
            if not values:
                raise BenchError(f"{name} is empty; expected at least one")
            for value in values:
                if isinstance(value, int) and value < 1:
                    raise BenchError(f"{name} holds {value}; expected at least 1")
        for samples in self.samples:
            for ranks in self.ranks:
                if samples % ranks:
                    raise BenchError(f"samples holds {samples}; expected multiples of {ranks}, a number of ranks")
        for name, least in (
            ("verl_s", 0),
            ("tolerance", 0),
            ("rounds", 1),
            ("steps", 1),
            ("seed", 0),
            ("live_devices", 2),
            ("live_phase_steps", 1),
            ("live_batch", 1),
            ("live_step_ms", 0),
            ("live_swap_ms", 0),
            ("study_steps", 0),
            ("study_processes", 0),
        ):
            if getattr(self, name) < least:
                raise BenchError(f"{name} is {getattr(self, name)}; expected at least {least}")
        if not self.study_folder.absolute().parent.is_dir():
            raise BenchError(f"study_folder is {self.study_folder}; expected a path in an existing folder")
        if self.json is not None and not self.json.absolute().parent.is_dir():
            raise BenchError(f"json is {self.json}; expected a file in an existing folder")

    def sized(self) -> Self:
        """Return the options with the sizes of ``quick``, if it is set."""
        if not self.quick:
            return self
        live = replace(self, live_devices=2, live_phase_steps=1, live_batch=16, live_step_ms=1.0, live_swap_ms=20.0)
        return replace(live, samples=(64, 512), ranks=(4, 8), rounds=1, steps=1, study_steps=2)
