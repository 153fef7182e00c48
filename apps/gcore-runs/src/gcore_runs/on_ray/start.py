"""The start of a run on Ray: gcore-controller's backend with the engines, the placement and the logs of a run."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from gcore_controller import (
    ActorRole,
    Context,
    Handles,
    RayBackend,
    RemoteRecorder,
    RoleActors,
    Sizes,
    TrainerSpec,
)
from gcore_rollout import Engine, EngineDiedError, EngineHandle, RayEngine, end_engine_actor, start_engine_actor
from gcore_runs.logs import logged, logs_of
from gcore_runs.loop.recorder import RunJob
from gcore_runs.on_ray.cluster import connect
from gcore_runs.on_ray.controller_process import ControllerServices, PlacedConfig, controller_services
from gcore_runs.on_ray.live_placement import LivePlacement
from gcore_runs.settings.run_config import PlacementConfig

JobT = TypeVar("JobT", bound=RunJob[Any])
ConfigT = TypeVar("ConfigT", bound=PlacedConfig)
EvaluationT = TypeVar("EvaluationT")

EngineFactory = Callable[[], Engine[Any, Any]]
RunController = Callable[[JobT, Context[Handles], ControllerServices, RemoteRecorder[Any]], Awaitable[None]]
"""Runs the program of a job on one controller, with the services that it is connected to."""


async def start_ray_backend(
    config: ConfigT,
    *,
    factories: Mapping[ActorRole, Callable[[ConfigT], EngineFactory]],
    trainer_spec: Callable[[ConfigT], TrainerSpec],
    run_controller: RunController[JobT],
    checkpoints: Path,
    announce: Callable[[str], None] | None = None,
) -> RayBackend[JobT, ConfigT, Any]:
    """Start the actors of all roles, on the cluster that the config names or a new one on this machine.

    Args:
        config: the settings, with the sizes that are asked for.
        factories: for each role, what builds its engines with given settings.
        trainer_spec: the training ranks for given settings.
        run_controller: called in the process of each controller, for every job.
        checkpoints: folder of the run's checkpoints.
        announce: prints a line on the screen.

    Raises:
        ClusterError: the cluster lacks the capacity.
        UserError: the cluster cannot be reached.
    """
    connect(config)
    logs = logs_of(checkpoints.absolute())
    backend: RayBackend[JobT, ConfigT, Any] = RayBackend(
        config,
        engines=RoleActors(list(factories), _EngineActors(factories, logs)),
        trainer_spec=trainer_spec,
        program=lambda job: partial(_run_controller, job, run_controller, logs),
        placement=_placement(config.placement),
        engine_errors=(EngineDiedError,),
        announce=announce,
    )
    return await backend.start()


class _EngineActors(Generic[ConfigT]):
    """See `gcore_controller.EngineActors`: gcore-rollout's, whose processes log to files of their own."""

    def __init__(self, factories: Mapping[ActorRole, Callable[[ConfigT], EngineFactory]], logs: Path) -> None:
        self._factories = factories
        self._logs = logs

    def factory(self, role: ActorRole, config: ConfigT, number: int) -> EngineFactory:
        return partial(logged, self._logs, role, number, self._factories[role](config))

    def start(self, factory: EngineFactory, **options: Any) -> EngineHandle:
        return start_engine_actor(factory, **options)

    async def end(self, handle: EngineHandle) -> None:
        await end_engine_actor(handle)

    async def connect(self, handle: EngineHandle, *, timeout_s: float) -> RayEngine[Any, Any]:
        return await RayEngine.connect(handle, start_timeout_s=timeout_s)


def _placement(config: PlacementConfig) -> Callable[[Sizes], LivePlacement] | None:
    """Return how engines are divided among the roles; None: as the sizes say."""
    return None if config.strategy in ("split", "colocated") else partial(LivePlacement, config=config)


async def _run_controller(job: Any, run_controller: RunController[Any], logs: Path, ctx: Context[Handles]) -> None:
    async with controller_services(ctx, job.config, logs) as own:
        await run_controller(job, ctx, own, RemoteRecorder[Any](ctx.report))
