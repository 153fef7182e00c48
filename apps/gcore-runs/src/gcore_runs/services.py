"""What runs a job: the role services and the controllers, in this process or on a cluster."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from gcore_controller import Context, Recorder, StageTimer, run_inline

State = dict[str, Any]
RolesT = TypeVar("RolesT")


class TrainerSettings(Protocol):
    """How long a run is."""

    @property
    def total_training_steps(self) -> int: ...


class RunConfig(Protocol):
    """Settings of a run, as far as all apps have them."""

    @property
    def controllers(self) -> int: ...

    @property
    def trainer(self) -> TrainerSettings: ...


ConfigT = TypeVar("ConfigT", bound=RunConfig)


@dataclass(frozen=True, kw_only=True)
class RunJob(Generic[ConfigT]):
    """What a program needs to know beyond its roles, whatever it trains."""

    config: ConfigT
    first_step: int
    """Steps already made."""
    is_evaluated: bool
    """Whether the evaluation after them, if one is due, is recorded already."""
    controllers: list[State] | None = None
    """The controllers' states to resume from, by rank."""
    is_policy_behind: bool = False
    """Whether the engines lack the models' present weights."""

    @property
    def total_steps(self) -> int:
        """Of the whole run."""
        return self.config.trainer.total_training_steps


JobT_contra = TypeVar("JobT_contra", bound=RunJob[Any], contravariant=True)
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


class InlineServices(ABC, Generic[ConfigT, RolesT]):
    """`Services` that belong to this process.

    Args:
        config: the run's.
        roles: what controllers share.
    """

    def __init__(self, config: ConfigT, roles: RolesT) -> None:
        self.config = config
        self._roles = roles
        self._timers: dict[int, StageTimer] = {}

    @property
    @abstractmethod
    def learner(self) -> SavedLearner:
        """See `Services.learner`."""

    @property
    def shortfall(self) -> str:
        """See `Services.shortfall`; this process has room for all."""
        return ""

    async def run_program(self, program: Callable[[Context[RolesT]], Coroutine[Any, Any, None]]) -> None:
        """Run a program on every controller, whose stages can be seen meanwhile."""

        async def watched(ctx: Context[RolesT]) -> None:
            self._timers[ctx.rank] = ctx.timer
            await program(ctx)

        await run_inline(watched, roles=self._roles, world_size=self.config.controllers)

    def stages(self) -> Sequence[str | None]:
        """See `Services.stages`."""
        return [timer.current for _, timer in sorted(self._timers.items())]

    async def recover(self, error: Exception, *, keeps_models: bool) -> Recovery:
        """See `Services.recover`; replicas of engines are replaced while the program runs, and nothing else is."""
        del keeps_models
        raise error

    async def close(self) -> None:
        """See `Services.close`."""
        try:
            self.learner.close()
        finally:
            await self._close_engines()

    @abstractmethod
    async def _close_engines(self) -> None: ...
