"""What runs a job: the role services and the controllers, in this process or on a cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from gcore_runs.recording import Recorder

State = dict[str, Any]


class RunJob(Protocol):
    """What a program needs to know beyond its roles, as far as it is the same for all."""

    @property
    def first_step(self) -> int:
        """Steps already made."""
        ...

    @property
    def controllers(self) -> list[State] | None:
        """The controllers' states to resume from, by rank."""
        ...

    @property
    def total_steps(self) -> int:
        """Of the whole run."""
        ...


JobT_contra = TypeVar("JobT_contra", bound=RunJob, contravariant=True)
ConfigT_co = TypeVar("ConfigT_co", covariant=True)
EvaluationT_co = TypeVar("EvaluationT_co", covariant=True)


class SavedLearner(Protocol):
    """What a run asks of the models in training between two steps, wherever they are."""

    @property
    def num_updates(self) -> int:
        """Updates of all models so far."""
        ...

    def save_pretrained(self, path: Path) -> None:
        """Write the policy's folder, as its library loads it."""
        ...

    def save(self, step: int, rest: State) -> None:
        """Checkpoint all models, and ``rest`` beside them; returns when they are copied."""
        ...

    def load(self) -> State:
        """Take over the latest checkpoint; gives the ``rest`` that was saved in it."""
        ...

    def close(self) -> None:
        """Wait for checkpoints to be written, and end processes."""
        ...


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """How what a run had lost was replaced; it can be run again, from where its models are."""

    said: str
    """What died and what was done, in a line."""
    keeps_models: bool
    """The models in training are as the run left them; otherwise they are those that it began with."""
    cause: Literal["failure", "swap"] = "failure"
    """What the time that it took counts as; swap: nothing died, engines changed their role."""


class Services(Protocol[JobT_contra, ConfigT_co, EvaluationT_co]):
    """All that a job runs on."""

    @property
    def config(self) -> ConfigT_co:
        """The settings, with the sizes that there is room for."""
        ...

    @property
    def learner(self) -> SavedLearner: ...

    @property
    def shortfall(self) -> str:
        """What of the settings there is no room for, in a line; empty: there is room for all."""
        ...

    async def run(self, job: JobT_contra, recorder: Recorder[EvaluationT_co]) -> None:
        """Run the program on every controller."""
        ...

    def stages(self) -> Sequence[str | None]:
        """The stage that each controller is in, or was lately."""
        ...

    async def recover(self, error: Exception, *, keeps_models: bool) -> Recovery:
        """Replace what a run that ended with this error has lost.

        Args:
            keeps_models: the models in training are in order; otherwise they are put back to where the run began.

        Raises:
            Exception: the error itself, if nothing died that can be replaced.
        """
        ...

    async def close(self) -> None:
        """End all services, the learner's included."""
        ...
