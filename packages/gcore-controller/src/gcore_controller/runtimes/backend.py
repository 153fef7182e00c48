"""Backends: a run's role services and its controllers, on which jobs run and which replace what dies."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from gcore_controller.context import Context, Program, RolesT
from gcore_controller.rlhf.recorder import Recorder
from gcore_controller.runtimes.inline import run_inline
from gcore_controller.stages import StageTimer
from gcore_controller.trainer_group import TrainerGroup

JobT = TypeVar("JobT")
JobT_contra = TypeVar("JobT_contra", contravariant=True)
ConfigT = TypeVar("ConfigT")
ConfigT_co = TypeVar("ConfigT_co", covariant=True)
EvaluationT = TypeVar("EvaluationT")
EvaluationT_co = TypeVar("EvaluationT_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The replacement of lost processes; the job can run again from the state of its models."""

    message: str
    """A line that says what died and what was done."""
    keeps_models: bool
    """Whether the models in training are as the job left them; otherwise they are those that the run started with."""
    cause: Literal["failure", "swap"] = "failure"
    """The cause that the time counts as; swap: nothing died, engines changed their role."""


class Backend(Protocol[JobT_contra, ConfigT_co, EvaluationT_co]):
    """Everything that a job runs on."""

    @property
    def config(self) -> ConfigT_co:
        """The settings, with the sizes that there is capacity for."""
        ...

    @property
    def learner(self) -> TrainerGroup:
        """The models in training."""
        ...

    @property
    def shortfall(self) -> str:
        """Which of the settings' sizes there is no capacity for, in a line; empty if there is capacity for all."""
        ...

    async def run(self, job: JobT_contra, recorder: Recorder[EvaluationT_co]) -> None:
        """Run a job's program on every controller."""
        ...

    def stages(self) -> Sequence[str | None]:
        """Return the stage that each controller is in, or was lately."""
        ...

    async def recover(self, error: Exception, *, keeps_models: bool) -> Recovery:
        """Replace what a job that ended with this error has lost.

        Args:
            error: what the job ended with.
            keeps_models: the models in training are intact; otherwise they are reset to those that the run started
                with.

        Raises:
            Exception: the error itself, if nothing died that can be replaced.
        """
        ...

    async def close(self) -> None:
        """End all services, including the trainer group."""
        ...


class InlineBackend(Generic[JobT, ConfigT, RolesT, EvaluationT]):
    """A `Backend` whose controllers, and what they share, belong to this process.

    Args:
        config: the run's.
        roles: services that the controllers share.
        world_size: number of controllers.
        learner: the models in training.
        program: of a job, whose events go to a recorder.
        close: ends the services other than the trainer group.

    Attributes:
        config: See `Backend.config`.
        learner: See `Backend.learner`.
        shortfall: See `Backend.shortfall`; this process has capacity for everything.
    """

    shortfall = ""

    def __init__(
        self,
        config: ConfigT,
        *,
        roles: RolesT,
        world_size: int,
        learner: TrainerGroup,
        program: Callable[[JobT, Recorder[EvaluationT]], Program[RolesT, None]],
        close: Callable[[], Awaitable[Any]],
    ) -> None:
        self.config = config
        self.learner = learner
        self._roles = roles
        self._world_size = world_size
        self._program = program
        self._close = close
        self._timers: dict[int, StageTimer] = {}

    async def run(self, job: JobT, recorder: Recorder[EvaluationT]) -> None:
        """See `Backend.run`."""
        program = self._program(job, recorder)

        async def observed(ctx: Context[RolesT]) -> None:
            self._timers[ctx.rank] = ctx.timer
            await program(ctx)

        await run_inline(observed, roles=self._roles, world_size=self._world_size)

    def stages(self) -> Sequence[str | None]:
        """See `Backend.stages`."""
        return [timer.current for _, timer in sorted(self._timers.items())]

    async def recover(self, error: Exception, *, keeps_models: bool) -> Recovery:
        """See `Backend.recover`; replicas of engines are replaced while the program runs, and nothing else is."""
        del keeps_models
        raise error

    async def close(self) -> None:
        """See `Backend.close`."""
        try:
            self.learner.close()
        finally:
            await self._close()
