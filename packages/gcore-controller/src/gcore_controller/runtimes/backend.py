"""Backends, on which jobs run and which replace what dies; the numbers of a run's processes, and their settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self, TypeVar

from gcore_controller.rlhf.events import Recorder
from gcore_controller.trainer_group import TrainerGroup

LENT = "lent"
"""The role of engines of the policy on the devices of ranks that are lent, in names and as a `RoleActors` has it."""

JobT_contra = TypeVar("JobT_contra", contravariant=True)
ConfigT_co = TypeVar("ConfigT_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The replacement of lost processes; the job can run again from the state of its models."""

    message: str
    """A line that says what died and what was done."""
    keeps_models: bool
    """Whether the models in training are as the job left them; otherwise they are those that the run started with."""
    cause: Literal["failure", "swap"] = "failure"
    """The cause that the time counts as; swap: nothing died, engines changed their role."""


class Backend(Protocol[JobT_contra, ConfigT_co]):
    """Everything that a job runs on.

    Example:
        >>> async def run_job(backend: Backend, job: str, recorder: Recorder) -> None:
        ...     try:
        ...         await backend.run(job, recorder)
        ...     except ControllerError as error:
        ...         recovery = await backend.recover(error, keeps_models=False)
        ...         print(recovery.message)
        ...     finally:
        ...         await backend.close()
    """

    @property
    def config(self) -> ConfigT_co:
        """The settings, with the sizes that there is capacity for."""
        ...

    @property
    def learner(self) -> TrainerGroup: ...

    async def run(self, job: JobT_contra, recorder: Recorder) -> None:
        """Run a job's program on every controller."""

    def stages(self) -> Sequence[str | None]:
        """Return the stage that each controller is in, or was lately."""
        ...

    async def recover(self, error: Exception, *, keeps_models: bool) -> Recovery:
        """Replace what a job that ended with this error has lost, or raise it if that cannot be replaced.

        ``keeps_models``: the models in training are intact; else they are reset to those that the run started with.
        """
        ...

    async def close(self) -> None:
        """End all services, including the trainer group."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The number of processes of each role.

    Example:
        >>> sizes = Sizes(controllers=1, engines=4, judges={"judge": 2}, ranks=8, devices_per_engine=2)
        >>> print(sizes)
        1 controller, 4 engines, 2 judges and 8 training ranks
        >>> sizes.num_engine_places, sizes.num_reserved
        (6, 21)
        >>> Sizes(controllers=1, engines=4, ranks=8, ranks_in_turns=True).num_own_ranks
        4
    """

    controllers: int
    engines: int
    """Engines of the policy that the run starts; 0: controllers connect to engines that run elsewhere."""
    judges: Mapping[str, int] = field(default_factory=dict[str, int])
    """Engines of each judge, by the name of its role: ``judge``, or ``judge_`` and a name of its own."""
    ranks: int
    in_turns: bool = False
    """Each engine shares its device with one of every judge, and one of them is awake."""
    devices_per_engine: int = 1
    """Devices of each engine and each judge, over which its model is split."""
    ranks_in_turns: bool = False
    """Ranks are on the devices of engines and judges, which are asleep while the ranks work, and the other way round;
    where there are more ranks than those, the rest have devices of their own."""
    lends_ranks: bool = False
    """The devices of the ranks have further engines of the policy, which are awake while the ranks are asleep."""

    @property
    def num_processes(self) -> int:
        return self.controllers + self.engines + self.num_lent + self.num_judges + self.ranks

    @property
    def shares_ranks(self) -> bool:
        """True if engines take turns with ranks, on the same devices."""
        return self.ranks_in_turns or self.lends_ranks

    @property
    def num_lent(self) -> int:
        """Engines of the policy on the devices of ranks that are lent."""
        if not self.lends_ranks:
            return 0
        return self.ranks // self.devices_per_engine

    @property
    def num_judges(self) -> int:
        """Engines of all judges."""
        return sum(self.judges.values())

    @property
    def num_engine_places(self) -> int:
        """Places of engines and judges, each of ``devices_per_engine`` devices."""
        if self.in_turns:
            return self.engines
        return self.engines + self.num_lent + self.num_judges

    @property
    def num_reserved(self) -> int:
        """Devices of all processes, controllers included."""
        return (
            self.controllers + self.num_engine_places * self.devices_per_engine + self.num_own_ranks
        )

    @property
    def num_own_ranks(self) -> int:
        """Ranks on devices that no engine has reserved."""
        num_shared = self.num_engine_places if self.ranks_in_turns else self.num_lent
        return max(0, self.ranks - num_shared * self.devices_per_engine)

    def __str__(self) -> str:
        parts = {
            "controller": self.controllers,
            "engine": self.engines,
            "lent engine": self.num_lent,
            "judge": self.num_judges,
        }
        names: list[str] = []
        for name, count in parts.items():
            if count:
                names.append(f"{count} {name}{'s' * (count > 1)}")
        return f"{', '.join(names)} and {self.ranks} training rank{'s' * (self.ranks > 1)}"


class RaySettings(Protocol):
    """Resources of a Ray cluster that each process of a run reserves, besides one CPU."""

    @property
    def gpus_per_engine(self) -> float: ...
    @property
    def gpus_per_rank(self) -> float: ...
    @property
    def elastic(self) -> bool:
        """True if the run adapts its size to the capacity of the cluster."""
        ...

    @property
    def timeout_s(self) -> float:
        """Longest time for the processes of a role to start, in seconds."""
        ...


class SizedConfig(Protocol):
    """Settings of a run, as far as its processes go."""

    @property
    def ray(self) -> RaySettings: ...
    @property
    def device(self) -> str:
        """Type of the devices of engines and ranks, as torch names it."""
        ...

    @property
    def threads(self) -> int:
        """Threads of torch that the processes of a role share on each machine."""
        ...

    @property
    def gpus_per_controller(self) -> float:
        """GPUs that each controller reserves for models of its own."""
        ...

    @property
    def sizes(self) -> Sizes:
        """The sizes that the settings ask for."""
        ...

    @property
    def rank_unit(self) -> int:
        """Number whose multiples the number of training ranks can be."""
        ...

    def with_sizes(self, sizes: Sizes) -> Self:
        """Return the same settings for other sizes."""
        ...
