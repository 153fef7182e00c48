"""A run's services as actors of a Ray cluster, and their replacement when they die."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import ray

from gcore_controller import Context
from gcore_controller.errors import ControllerDiedError
from gcore_controller.runtimes.ray import RayControllers
from gcore_rollout.errors import EngineDiedError
from gcore_rollout.ray_engine import EngineHandle
from gcore_runs.errors import RankError
from gcore_runs.on_ray.cluster import connect
from gcore_runs.on_ray.engine_actors import EngineActors, Factory, Role
from gcore_runs.on_ray.live_placement import LivePlacement, PlacementMovedError
from gcore_runs.on_ray.reports import Report
from gcore_runs.on_ray.room import RoomChangedError
from gcore_runs.on_ray.room_watch import RoomWatch
from gcore_runs.on_ray.training_ranks import RankHandles, RayLearner
from gcore_runs.recording import Recorder
from gcore_runs.services import Recovery, RunJob
from gcore_runs.sizes import SizedConfig, Sizes

_WATCH_EVERY_S = 1.0

JobT = TypeVar("JobT", bound=RunJob[Any])
ConfigT = TypeVar("ConfigT", bound=SizedConfig)
EvaluationT = TypeVar("EvaluationT")


@dataclass(frozen=True, kw_only=True)
class Handles:
    """What every controller is given of the services."""

    engines: Sequence[EngineHandle]
    """The policy's actors; controller r has every ``world_size``-th from the r-th."""
    judges: Sequence[EngineHandle]
    """The judge's actors, if the run has one; they are shared out likewise, or several controllers have one."""
    ranks: RankHandles
    folder: Path
    """The working folder, from which the user's paths are to be read."""
    logs: Path


class RayServices(Generic[JobT, ConfigT, EvaluationT]):
    """Controllers, engines and training ranks on a Ray cluster; made by `start`.

    Args:
        config: the settings, with the sizes that are asked for.
        factories: what makes the engines of each role with given settings.
        learner: the models in training, not yet started.
        program: that every controller runs, for a job.
        logs: folder of the files that processes log to.
        announce: puts a line on the screen, such as what an engine died of.

    Attributes:
        config: The settings, in the size that the cluster has room for.
        learner: The models in training.
    """

    def __init__(
        self,
        config: ConfigT,
        *,
        factories: Mapping[Role, Callable[[ConfigT], Factory]],
        learner: RayLearner[ConfigT],
        program: Callable[[JobT], Callable[[Context[Handles]], Awaitable[None]]],
        logs: Path,
        announce: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config
        self._announce = announce
        self._announced: set[str] = set()
        self.learner = learner
        self._asked = config
        self._program = program
        self._logs = logs
        self._room = RoomWatch(config)
        self._placement: LivePlacement | None = None
        self._controllers: RayControllers | None = None
        self._engines = EngineActors(factories, logs=logs)
        self._stages: Sequence[str | None] = []
        self._is_updating = False

    async def start(self) -> Self:
        """Start the actors of all roles, on the cluster that the config names or a new one on this machine.

        Raises:
            ClusterError: there is no room for them.
            UserError: the cluster cannot be reached.
        """
        connect(self._asked)
        try:
            await self._settle(keeps_models=False)
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def shortfall(self) -> str:
        """See `Services.shortfall`."""
        return self._room.shortfall

    async def run(self, job: JobT, recorder: Recorder[EvaluationT]) -> None:
        """See `Services.run`."""
        handles = Handles(
            engines=self._engines.handles["engine"],
            judges=self._engines.handles.get("judge", []),
            ranks=self.learner.ranks,
            folder=Path.cwd(),
            logs=self._logs,
        )

        async def reported(rank: int, report: Report) -> None:
            del rank
            if report.method == "announced":
                self._announce_once(*report.arguments)
                return
            if report.method == "stepped" and self._placement is not None:
                report.arguments[1].update(self._placement.metrics())
            await getattr(recorder, report.method)(*report.arguments)
            self._is_updating = report.method == "updating"
            if report.method == "stepped" and self._placement is not None:
                _, metrics, _, devices = report.arguments
                self._placement.observe(metrics, devices)
            if report.method == "reached" and report.arguments[0] < job.total_steps:
                self._room.check_growth()
                self._check_placement()

        assert self._controllers is not None
        self._is_updating = False
        watching = asyncio.create_task(self._watch())
        try:
            run = self._controllers.run(self._program(job), roles=handles, reported=reported)
            await self._while_room_lasts(run)
        finally:
            watching.cancel()

    def stages(self) -> Sequence[str | None]:
        """See `Services.stages`."""
        return self._stages

    async def recover(self, error: Exception, *, keeps_models: bool) -> Recovery:
        """See `Services.recover`."""
        match error:
            case ControllerDiedError():
                done = "another takes its slice over"
            case EngineDiedError():
                done = "they were started anew"
            case RankError():
                done = "all training ranks were started anew"
            case RoomChangedError() | PlacementMovedError():
                done = ""
            case _:
                raise error
        before = self._room.whole
        keeps_models = await self._settle(keeps_models=keeps_models)
        if self._room.whole != before:
            done = f"the run has {self._room.whole} now, of {self._asked.sizes}"
        return Recovery(
            said=f"{error}; {done}" if done else str(error),
            keeps_models=keeps_models,
            cause="swap" if isinstance(error, PlacementMovedError) else "failure",
        )

    async def close(self) -> None:
        """End all services, the cluster if it was started for the run included."""
        try:
            self.learner.close()
        finally:
            await self._engines.close()
            if self._controllers is not None:
                await self._controllers.close()
            ray.shutdown()

    async def _settle(self, *, keeps_models: bool) -> bool:
        """Have all processes there that there is room for.

        Returns:
            whether the models in training are still what they were.
        """
        while True:
            sizes = self._sizes()
            config = self._asked.with_sizes(sizes)
            if keeps_models and sizes.ranks != self.config.sizes.ranks:
                # A checkpoint of theirs may still be under way.
                with suppress(RankError):
                    self.learner.close()
                keeps_models = False
            try:
                await self._while_room_lasts(self._resize(config, keeps_models=keeps_models))
                return keeps_models
            except RoomChangedError:
                keeps_models = False

    def _sizes(self) -> Sizes:
        """Those that there is room for, with the engines where they are needed."""
        whole, placement = self._room.size(), self._asked.placement
        if placement.strategy in ("split", "colocated"):
            return whole
        if self._placement is None or self._placement.whole != whole:
            self._placement = LivePlacement(whole, placement)
        return self._placement.sizes

    async def _resize(self, config: ConfigT, *, keeps_models: bool) -> None:
        if self._controllers is not None and config.sizes.controllers != self.config.sizes.controllers:
            await self._controllers.close()
            self._controllers = None
        self.config = config
        if self._controllers is None:
            self._controllers = await RayControllers.start(
                world_size=config.sizes.controllers,
                num_cpus=config.ray.cpus_per_process,
                start_timeout_s=config.ray.timeout_s,
            )
        await self._engines.have(config.sizes, config)
        if self._placement is not None and self._placement.swap_s is None:
            self._placement.swap_s = await self._engines.swap_seconds(config)
        if not keeps_models:
            await self.learner.start(config)

    async def _while_room_lasts(self, work: Coroutine[Any, Any, list[None] | None]) -> None:
        """
        Raises:
            RoomChangedError: nodes were lost, so that not all processes have a place any more.
        """
        working = asyncio.create_task(work)
        watching = asyncio.create_task(self._loss_of_room())
        try:
            await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise watching.result()
            await working
        finally:
            watching.cancel()
            working.cancel()
            await asyncio.wait([working])

    async def _loss_of_room(self) -> RoomChangedError:
        """Wait until there is no room any more for all that there is."""
        while True:
            loss = await self._room.loss(self.config.sizes)
            # In the midst of an update it is found out there; otherwise the step is made to its end.
            if not self._is_updating:
                return loss

    def _check_placement(self) -> None:
        """
        Raises:
            PlacementMovedError: engines are busier in one role than in the other.
        """
        if self._placement is not None and (sizes := self._placement.sizes) != (now := self.config.sizes):
            raise PlacementMovedError(_move(now, sizes))

    def _announce_once(self, line: str) -> None:
        """Put a line on the screen, unless another controller with the same engine has said it already."""
        if self._announce is not None and line not in self._announced:
            self._announced.add(line)
            self._announce(line)

    async def _watch(self) -> None:
        assert self._controllers is not None
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            self._stages = await self._controllers.stages()


def _move(before: Sizes, after: Sizes) -> str:
    """What happens to the engines."""
    if after.in_turns:
        return f"{after.engines} devices generate and judge in turns now"
    if before.in_turns:
        return f"{after.engines} engines generate and {after.judges} judge now, side by side"
    source, target = ("policy", "judge") if after.engines < before.engines else ("judge", "policy")
    moved = abs(after.engines - before.engines)
    return (
        f"{moved} engine{'s' * (moved > 1)} moved from the {source} to the {target}: {after.engines} generate "
        f"and {after.judges} judge now"
    )
