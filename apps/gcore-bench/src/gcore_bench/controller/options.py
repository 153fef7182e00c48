"""Options of `gcore-bench controller`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self, get_args

from gcore_bench.grpo.errors import BenchError

PartName = Literal["dispatch", "sim"]
Contender = Literal["gcore", "verl", "verl-numpy"]


@dataclass(frozen=True, kw_only=True)
class ControllerOptions:
    """Measure controllers that hand on references beside verl's single driver, and their load in simulated clusters."""

    parts: tuple[PartName, ...] = get_args(PartName)
    """dispatch: steps whose payload goes from rollout workers to trainer ranks; sim: simulated clusters."""
    contenders: tuple[Contender, ...] = get_args(Contender)
    """Who dispatches, in this order, in every round."""
    payload_mb: tuple[int, ...] = (64, 256, 1024, 4096)
    """Payloads of a step, in MiB."""
    controllers: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of gcore's controllers, each a contender of its own."""
    samples: int = 64
    """Samples of a step, which grow with the payload: a multiple of the workers and of every number of controllers."""
    workers: int = 4
    """Rollout workers, and as many trainer ranks."""
    rounds: int = 3
    """How often everything is measured, in turn."""
    steps: int = 3
    """Steps of a contender in a round, after two that do not count."""
    object_store_mb: int = 0
    """Of Ray, in MiB; 0: somewhat more than twice the payload, at most 45 % of the memory that is free."""
    devices: tuple[int, ...] = (8, 64, 512, 4096, 32_768, 100_000)
    """Sizes of the simulated clusters."""
    sim_controllers: tuple[int, ...] = (1, 64)
    """Numbers of controllers of the simulated clusters."""
    sim_steps: int = 10
    """Steps of a simulation; fewer, at least one, from about six thousand devices on."""
    seed: int = 0
    """Of lengths, features and simulations."""
    quick: bool = False
    """Everything once, at sizes that take no time: to see that it runs. The figures say nothing."""
    html: Path | None = None
    """File to draw the curves of part sim to."""
    json: Path | None = None
    """File to write every figure to."""

    def __post_init__(self) -> None:
        lowest = dict.fromkeys(("samples", "workers", "rounds", "steps", "sim_steps"), 1)
        lowest |= {"object_store_mb": 0, "seed": 0}
        for name, least in lowest.items():
            if getattr(self, name) < least:
                raise BenchError(f"{name} is {getattr(self, name)}; expected {least} or more")
        for name in ("parts", "contenders", "payload_mb", "controllers", "devices", "sim_controllers"):
            values = getattr(self, name)
            if not values:
                raise BenchError(f"{name} is empty: at least one is needed")
            for value in values:
                if isinstance(value, int) and value < 1:
                    raise BenchError(f"{name} holds {value}; expected 1 or more")
        for number in (self.workers, *self.controllers):
            if self.samples % number:
                raise BenchError(f"samples is {self.samples}: a multiple of {number} is needed")
        for devices in self.devices:
            if devices % 8:
                raise BenchError(f"devices holds {devices}: multiples of 8, a trainer's replica, are needed")
        for name in ("html", "json"):
            path = getattr(self, name)
            if path is not None and not path.absolute().parent.is_dir():
                raise BenchError(f"{name} is {path}: {path.absolute().parent} is no folder")

    def sized(self) -> Self:
        """With the sizes of ``quick``, if that was asked for."""
        if not self.quick:
            return self
        return replace(
            self,
            payload_mb=(1, 4),
            controllers=(1, 2),
            samples=8,
            workers=2,
            rounds=1,
            steps=1,
            object_store_mb=100,
            devices=(8, 64),
            sim_controllers=(1, 4),
            sim_steps=1,
        )
