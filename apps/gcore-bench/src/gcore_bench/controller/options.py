"""Options of `gcore-bench controller`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from gcore_bench.harness.options import BenchError, Count, NonNegative, OutputFile, QuickOptions, at_least, multiple_of

PartName = Literal["dispatch", "sim"]
ContenderName = Literal["gcore", "verl", "verl-numpy"]


@dataclass(frozen=True, kw_only=True)
class ControllerOptions(QuickOptions):
    """Measure controllers that pass references against verl's single driver, and their load in simulated clusters."""

    parts: tuple[PartName, ...] = get_args(PartName)
    """dispatch: steps whose payload goes from rollout workers to trainer ranks; sim: simulated clusters."""
    contenders: tuple[ContenderName, ...] = get_args(ContenderName)
    """Contenders of the part dispatch, in the order in which they run in every round."""
    payload_mb: tuple[Count, ...] = (64, 256, 1024, 4096)
    """Payloads of a step, in MiB."""
    controllers: tuple[Count, ...] = (1, 2, 4, 8)
    """Numbers of gcore's controllers; each is a contender of its own."""
    samples: Count = 64
    """Samples of a step, whose size grows with the payload: a multiple of the workers and of each number of
    controllers."""
    workers: Count = 4
    """Rollout workers, and as many trainer ranks."""
    steps: Count = 3
    """Measured steps of a contender in a round, after two warm-up steps."""
    object_store_mb: NonNegative = 0
    """Size of Ray's object store, in MiB; 0: a little over twice the payload, at most 45 % of the free memory."""
    # A trainer's replica has eight devices.
    devices: tuple[Annotated[int, at_least(1), multiple_of(8)], ...] = (8, 64, 512, 4096, 32_768, 100_000)
    """Sizes of the simulated clusters."""
    sim_controllers: tuple[Count, ...] = (1, 64)
    """Numbers of controllers of the simulated clusters."""
    sim_steps: Count = 10
    """Steps of a simulation; fewer, but at least one, from about six thousand devices on."""
    seed: NonNegative = 0
    """Seed of lengths, features and simulations."""
    html: OutputFile = None
    """File to draw the curves of the part sim to."""

    QUICK: ClassVar[Mapping[str, Any]] = {
        "rounds": 1,
        "payload_mb": (1, 4),
        "controllers": (1, 2),
        "samples": 8,
        "workers": 2,
        "steps": 1,
        "object_store_mb": 100,
        "devices": (8, 64),
        "sim_controllers": (1, 4),
        "sim_steps": 1,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for number in (self.workers, *self.controllers):
            if self.samples % number:
                raise BenchError(f"samples is {self.samples}; expected a multiple of {number}")
