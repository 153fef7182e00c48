"""A job: what a run's program is started with, whatever it trains."""

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar


class TrainerSettings(Protocol):
    """The length of a run, and the number of steps between checkpoints."""

    @property
    def total_training_steps(self) -> int: ...

    @property
    def save_freq(self) -> int: ...


class RunConfig(Protocol):
    """Settings of a run that all apps have."""

    @property
    def controllers(self) -> int: ...

    @property
    def trainer(self) -> TrainerSettings: ...


ConfigT = TypeVar("ConfigT", bound=RunConfig)


@dataclass(frozen=True, kw_only=True)
class RunJob(Generic[ConfigT]):
    """The point that a run starts or resumes from."""

    config: ConfigT
    first_step: int
    """Steps completed before."""
    is_evaluated: bool
    """Whether the evaluation after these steps, if one is due, is recorded already."""
    controllers: list[dict[str, Any]] | None = None
    """The controllers' states to resume from, by rank."""
    is_policy_behind: bool = False
    """Whether the engines lack the present weights of the models."""

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.trainer.total_training_steps
