"""Options of `gcore-bench placement`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self, get_args

from gcore_bench.grpo.errors import BenchError

PartName = Literal["balancer"]
Counts = Literal["free", "equal"]
Lengths = Literal["lognormal", "pareto"]


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """Measure how evenly, and how quickly, gcore-placement shares sequences out, beside verl and dealing at random."""

    parts: tuple[PartName, ...] = get_args(PartName)
    """balancer: sequences over ranks, by simulated work."""
    samples: tuple[int, ...] = (512, 4096, 16_384, 100_352, 1_000_448)
    """Sequences of a batch: multiples of every number of ranks."""
    ranks: tuple[int, ...] = (8, 64, 512)
    """Ranks that share them."""
    counts: tuple[Counts, ...] = get_args(Counts)
    """free: only the work is to be even; equal: every rank gets as many sequences."""
    lengths: tuple[Lengths, ...] = get_args(Lengths)
    """How response lengths are distributed: lognormal, or with the heavier tail of a Pareto law."""
    verl_s: float = 240.0
    """CPU seconds that verl may take: where its time for the next smaller batch foretells more, it is not asked."""
    seed: int = 0
    """Of lengths and deals."""
    quick: bool = False
    """Small batches: to see that it runs."""
    json: Path | None = None
    """File to write every figure to."""

    def __post_init__(self) -> None:
        for name in ("parts", "samples", "ranks", "counts", "lengths"):
            values = getattr(self, name)
            if not values:
                raise BenchError(f"{name} is empty: at least one is needed")
            for value in values:
                if isinstance(value, int) and value < 1:
                    raise BenchError(f"{name} holds {value}: 1 or more is needed")
        for samples in self.samples:
            for ranks in self.ranks:
                if samples % ranks:
                    raise BenchError(f"samples holds {samples}: multiples of {ranks}, a number of ranks, are needed")
        if self.verl_s < 0:
            raise BenchError(f"verl_s is {self.verl_s}: 0 or more is needed")
        if self.seed < 0:
            raise BenchError(f"seed is {self.seed}: 0 or more is needed")
        if self.json is not None and not self.json.absolute().parent.is_dir():
            raise BenchError(f"json is {self.json}: {self.json.absolute().parent} is no folder")

    def sized(self) -> Self:
        """With the sizes of ``quick``, if that was asked for."""
        return replace(self, samples=(64, 512), ranks=(4, 8)) if self.quick else self
