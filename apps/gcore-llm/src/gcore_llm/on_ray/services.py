"""A run's services as actors of a Ray cluster, and their replacement when they die."""

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import ray

from gcore_controller.errors import ControllerDiedError
from gcore_controller.ray_runtime import RayControllers
from gcore_llm.config import TrainConfig
from gcore_llm.errors import RankError
from gcore_llm.evaluate import Evaluation
from gcore_llm.on_ray.cluster import connect
from gcore_llm.on_ray.controller import Handles, Report, controller_program
from gcore_llm.on_ray.engine_actors import EngineActors, Model, Role
from gcore_llm.on_ray.live_placement import LivePlacement, PlacementMovedError
from gcore_llm.on_ray.room import RoomChangedError, Sizes
from gcore_llm.on_ray.room_watch import RoomWatch
from gcore_llm.on_ray.training_ranks import RayLearner
from gcore_llm.program import Job
from gcore_llm.roles import build_tokenizer, eos_token_ids
from gcore_llm.services import Inputs, Recovery
from gcore_rollout.errors import EngineDiedError
from gcore_runs.logs import logs_of
from gcore_runs.recording import Recorder

_WATCH_EVERY_S = 1.0


class RayServices:
    """Controllers, engines and training ranks on a Ray cluster; made by `start`.

    Attributes:
        config: The settings, in the size that the cluster has room for.
        learner: The models in training.
    """

    def __init__(self, inputs: Inputs, model: Path, checkpoints: Path) -> None:
        self.config = inputs.config
        self.learner = RayLearner(inputs.config, model, checkpoints)
        self._inputs = inputs
        self._logs = logs_of(checkpoints.absolute())
        self._room = RoomWatch(inputs.config)
        self._placement: LivePlacement | None = None
        self._controllers: RayControllers | None = None
        models: dict[Role, Model] = {"engine": Model(path=model, eos_token_ids=eos_token_ids(inputs.tokenizer, model))}
        if inputs.config.num_ray_judges:
            path = Path(inputs.config.reward_model.path)
            models["judge"] = Model(path=path, eos_token_ids=eos_token_ids(build_tokenizer(path), path))
        self._engines = EngineActors(models, logs=self._logs)
        self._stages: Sequence[str | None] = []
        self._is_updating = False

    @classmethod
    async def start(cls, inputs: Inputs, model: Path, checkpoints: Path) -> Self:
        """Start the actors of all roles, on the cluster that the config names or a new one on this machine.

        Raises:
            ClusterError: there is no room for them.
            UserError: the cluster cannot be reached.
        """
        # What scores is started by each controller for itself.
        await inputs.rewards.close()
        connect(inputs.config)
        services = cls(inputs, model, checkpoints)
        try:
            await services._settle(keeps_models=False)
        except BaseException:
            await services.close()
            raise
        return services

    @property
    def shortfall(self) -> str:
        """See `Services.shortfall`."""
        return self._room.shortfall

    async def run(self, job: Job, recorder: Recorder[Evaluation]) -> None:
        """See `Services.run`."""
        handles = Handles(
            engines=self._engines.handles["engine"],
            judges=self._engines.handles.get("judge", []),
            ranks=self.learner.ranks,
            tokenizer=self._inputs.tokenizer,
            folder=Path.cwd(),
            logs=self._logs,
        )

        async def reported(rank: int, report: Report) -> None:
            del rank
            if report.method == "stepped" and self._placement is not None:
                report.arguments[1].update(self._placement.metrics())
            await getattr(recorder, report.method)(*report.arguments)
            self._is_updating = report.method == "updating"
            if report.method == "stepped" and self._placement is not None:
                _, metrics, _, devices = report.arguments
                self._placement.observe(metrics, devices)
            if report.method == "reached" and report.arguments[0] < job.config.trainer.total_training_steps:
                self._room.check_growth()
                self._check_placement()

        assert self._controllers is not None
        self._is_updating = False
        watching = asyncio.create_task(self._watch())
        try:
            program = controller_program(job)
            await self._while_room_lasts(self._controllers.run(program, roles=handles, reported=reported))
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
            done = f"the run has {self._room.whole} now, of {Sizes.of(self._inputs.config)}"
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
            config = sizes.applied(self._inputs.config)
            if keeps_models and sizes.ranks != Sizes.of(self.config).ranks:
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
        whole, placement = self._room.size(), self._inputs.config.placement
        if placement.strategy in ("split", "colocated"):
            return whole
        if self._placement is None or self._placement.whole != whole:
            self._placement = LivePlacement(whole, placement)
        return self._placement.sizes

    async def _resize(self, config: TrainConfig, *, keeps_models: bool) -> None:
        if self._controllers is not None and config.controllers != self.config.controllers:
            await self._controllers.close()
            self._controllers = None
        self.config = config
        if self._controllers is None:
            self._controllers = await RayControllers.start(
                world_size=config.controllers,
                num_cpus=config.ray.cpus_per_process,
                start_timeout_s=config.ray.timeout_s,
            )
        await self._engines.have(Sizes.of(config), config)
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
            loss = await self._room.loss(Sizes.of(self.config))
            # In the midst of an update it is found out there; otherwise the step is made to its end.
            if not self._is_updating:
                return loss

    def _check_placement(self) -> None:
        """
        Raises:
            PlacementMovedError: engines are busier in one role than in the other.
        """
        if self._placement is not None and (sizes := self._placement.sizes) != (now := Sizes.of(self.config)):
            raise PlacementMovedError(_move(now, sizes))

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
