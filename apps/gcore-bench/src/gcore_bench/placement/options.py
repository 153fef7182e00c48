"""Options of `gcore-bench placement`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self, get_args

from gcore_bench.grpo.errors import BenchError

PartName = Literal["balancer", "planner", "live"]
Counts = Literal["free", "equal", "close"]
Lengths = Literal["lognormal", "pareto"]


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """Measure gcore-placement: how evenly and quickly it shares sequences out, and how well its planner foretells."""

    parts: tuple[PartName, ...] = get_args(PartName)
    """balancer: sequences over ranks, by simulated work, beside verl and random; planner: seconds and memory of small
    runs, foretold by laws that were fitted to others; live: runs on Ray whose load drifts, under every strategy."""
    samples: tuple[int, ...] = (512, 4096, 16_384, 100_352, 1_000_448)
    """Sequences of a batch: multiples of every number of ranks."""
    ranks: tuple[int, ...] = (8, 64, 512)
    """Ranks that share them."""
    counts: tuple[Counts, ...] = get_args(Counts)
    """free: only the work is to be even; equal: every rank gets as many sequences; close: as equal, and gcore-placement
    may end within ``tolerance`` of the mean."""
    tolerance: float = 1e-3
    """Of close."""
    lengths: tuple[Lengths, ...] = get_args(Lengths)
    """How response lengths are distributed: lognormal, or with the heavier tail of a Pareto law."""
    verl_s: float = 240.0
    """CPU seconds that verl may take: where its time for the next smaller batch foretells more, it is not asked."""
    rounds: int = 3
    """How often each run of the planner is measured."""
    steps: int = 3
    """Of each, in every round."""
    live_devices: int = 4
    """That engines and judges of a live run share."""
    live_phase_steps: int = 6
    """Steps of each of its three phases: judging takes most, then generation, then judging again."""
    live_batch: int = 32
    """Prompts of a step, each with four responses: several times what engines run at once, as in large runs."""
    live_step_ms: float = 16.0
    """Least milliseconds of a decoding step of its engines, so that a few cores can stand for many devices."""
    live_swap_ms: float = 1000.0
    """That an engine of these takes to sleep, and as long to wake."""
    seed: int = 0
    """Of lengths, deals and models."""
    quick: bool = False
    """Small batches and models, one round: to see that it runs."""
    json: Path | None = None
    """File to write every figure to."""

    def __post_init__(self) -> None:
        for name in ("parts", "samples", "ranks", "counts", "lengths"):
            values = getattr(self, name)
            if not values:
                raise BenchError(f"{name} is empty: at least one is needed")
            for value in values:
                if isinstance(value, int) and value < 1:
                    raise BenchError(f"{name} holds {value}; expected 1 or more")
        for samples in self.samples:
            for ranks in self.ranks:
                if samples % ranks:
                    raise BenchError(f"samples holds {samples}: multiples of {ranks}, a number of ranks, are needed")
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
        ):
            if getattr(self, name) < least:
                raise BenchError(f"{name} is {getattr(self, name)}; expected {least} or more")
        if self.json is not None and not self.json.absolute().parent.is_dir():
            raise BenchError(f"json is {self.json}: {self.json.absolute().parent} is no folder")

    def sized(self) -> Self:
        """With the sizes of ``quick``, if that was asked for."""
        if not self.quick:
            return self
        live = replace(self, live_devices=2, live_phase_steps=1, live_batch=16, live_step_ms=1.0, live_swap_ms=20.0)
        return replace(live, samples=(64, 512), ranks=(4, 8), rounds=1, steps=1)
