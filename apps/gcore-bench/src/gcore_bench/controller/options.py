"""Options of `gcore-bench controller`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from gcore_bench.harness.options import (
    BenchError,
    Count,
    NonNegative,
    OutputFile,
    QuickOptions,
    above,
    at_least,
    multiple_of,
)

PartName = Literal["dispatch", "payloads", "sim"]
ContenderName = Literal["gcore", "verl", "verl-numpy"]


@dataclass(frozen=True, kw_only=True)
class ControllerOptions(QuickOptions):
    """Measure controllers that pass references against verl's single driver, and their load in simulated clusters."""

    parts: tuple[PartName, ...] = ("dispatch", "sim")
    """dispatch: steps whose payload goes from rollout workers to trainer ranks; sim: simulated clusters; payloads:
    prompts with image features of growing size through controllers that hold them, one or several, and through
    controllers that hold references."""
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
    prompt_mb: tuple[Annotated[float, above(0, "above 0")], ...] = (0.1, 1.0, 8.0, 64.0)
    """Image features of a prompt in the part payloads, in units of 10^6 bytes, ascending."""
    prompts: Count = 16
    """Prompts of its steps: a multiple of the workers and of each number of controllers."""
    object_store_mb: NonNegative = 0
    """Size of Ray's object store, in MiB; 0: a little over twice the payload (in payloads four times), at most 45 % of
    the free memory."""
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
    """File to draw the curves of the part sim or payloads to."""

    QUICK: ClassVar[Mapping[str, Any]] = {
        "rounds": 1,
        "payload_mb": (1, 4),
        "controllers": (1, 2),
        "samples": 8,
        "workers": 2,
        "steps": 1,
        "prompt_mb": (0.01, 0.5),
        "prompts": 8,
        "object_store_mb": 100,
        "devices": (8, 64),
        "sim_controllers": (1, 4),
        "sim_steps": 1,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for number in (self.workers, *self.controllers):
            for field in ("samples", *["prompts"] * ("payloads" in self.parts)):
                if (count := getattr(self, field)) % number:
                    raise BenchError(f"{field} is {count}; expected a multiple of {number}")
