"""A run's services as actors of a Ray cluster, and their replacement when they die."""

import asyncio
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import ray
from ray._private import worker as ray_worker
from ray.exceptions import RayError

from gcore_controller.errors import ControllerDiedError
from gcore_controller.ray_runtime import RayControllers
from gcore_llm.config import TrainConfig
from gcore_llm.engine_config import EngineConfig
from gcore_llm.engines import engine_factory
from gcore_llm.errors import RankError, UserError
from gcore_llm.logs import logged, logs_of
from gcore_llm.on_ray.controller import Handles, Report, controller_program
from gcore_llm.on_ray.room import Node, RoomChangedError, Sizes, alive_nodes, has_room, largest
from gcore_llm.on_ray.training_ranks import RayLearner
from gcore_llm.program import Job, Recorder
from gcore_llm.roles import build_tokenizer, eos_token_ids
from gcore_llm.services import Inputs, Recovery
from gcore_rollout.errors import EngineDiedError
from gcore_rollout.ray_engine import end_engine_actor, start_engine_actor

_CONNECT_TIMEOUT_S = 10.0
_WATCH_EVERY_S = 1.0
_SETTLED_S = 3.0
"""Nodes that join together are few seconds apart."""
_ANSWER_TIMEOUT_S = 10.0


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
        self._model = model
        self._logs = logs_of(checkpoints.absolute())
        self._controllers: RayControllers | None = None
        self._engines: list[Any] = []
        self._judges: list[Any] = []
        self._num_made = {"engine": 0, "judge": 0}
        self._stages: Sequence[str | None] = []
        self._nodes: dict[str, Node] = {}
        """Those that the present size was chosen for."""
        self._last_change: tuple[frozenset[str], float] = (frozenset(), 0.0)
        """The nodes that there are, and since when these."""
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
        _connect(inputs)
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
        asked, there = Sizes.of(self._inputs.config), Sizes.of(self.config)
        return "" if asked == there else f"the cluster has room for {there}, of {asked}"

    async def run(self, job: Job, recorder: Recorder) -> None:
        """See `Services.run`."""
        handles = Handles(
            engines=self._engines,
            judges=self._judges,
            ranks=self.learner.ranks,
            tokenizer=self._inputs.tokenizer,
            folder=Path.cwd(),
            logs=self._logs,
        )

        async def reported(rank: int, report: Report) -> None:
            del rank
            await getattr(recorder, report.method)(*report.arguments)
            self._is_updating = report.method == "updating"
            if report.method == "reached" and report.arguments[0] < job.config.trainer.total_training_steps:
                self._check_room_to_grow()

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
            case RoomChangedError():
                done = ""
            case _:
                raise error
        before = self.config
        keeps_models = await self._settle(keeps_models=keeps_models)
        if self.config != before:
            done = f"the run has {Sizes.of(self.config)} now, of {Sizes.of(self._inputs.config)}"
        return Recovery(said=f"{error}; {done}" if done else str(error), keeps_models=keeps_models)

    async def close(self) -> None:
        """End all services, the cluster if it was started for the run included."""
        try:
            self.learner.close()
        finally:
            engines = self._engines + self._judges
            await asyncio.gather(*(end_engine_actor(engine) for engine in engines), return_exceptions=True)
            if self._controllers is not None:
                await self._controllers.close()
            ray.shutdown()

    async def _settle(self, *, keeps_models: bool) -> bool:
        """Have all processes there that there is room for.

        Returns:
            whether the models in training are still what they were.
        """
        while True:
            self._nodes = alive_nodes()
            config = self._inputs.config
            if config.ray.elastic:
                config = largest(self._nodes.values(), config).applied(config)
            if config != self.config and keeps_models:
                # A checkpoint of theirs may still be under way.
                with suppress(RankError):
                    self.learner.close()
                keeps_models = False
            try:
                await self._while_room_lasts(self._resize(config, keeps_models=keeps_models))
                return keeps_models
            except RoomChangedError:
                keeps_models = False

    async def _resize(self, config: TrainConfig, *, keeps_models: bool) -> None:
        if self._controllers is not None and config != self.config:
            await self._controllers.close()
            self._controllers = None
        self.config = config
        if self._controllers is None:
            self._controllers = await RayControllers.start(
                world_size=config.controllers,
                num_cpus=config.ray.cpus_per_process,
                start_timeout_s=config.ray.timeout_s,
            )
        await _have(self._engines, config.num_ray_engines, self._start_engine)
        await _have(self._judges, config.num_ray_judges, self._start_judge)
        if not keeps_models:
            await self.learner.start(config)

    def _start_engine(self) -> Any:
        return self._start_actor("engine", self.config.rollout, self._model, self._inputs.tokenizer)

    def _start_judge(self) -> Any:
        path = Path(self.config.reward_model.path)
        return self._start_actor("judge", self.config.reward_model.judge, path, build_tokenizer(path))

    def _start_actor(self, role: str, settings: EngineConfig, model: Path, tokenizer: Any) -> Any:
        config = self.config
        factory = engine_factory(settings, config, model.absolute(), eos_token_ids=eos_token_ids(tokenizer, model))
        number, self._num_made[role] = self._num_made[role], self._num_made[role] + 1
        return start_engine_actor(
            partial(logged, self._logs, role, number, factory),
            num_cpus=config.ray.cpus_per_process,
            num_gpus=config.ray.gpus_per_engine if config.device.startswith("cuda") else 0,
            num_threads=max(1, config.threads // (config.num_ray_engines + config.num_ray_judges)),
            scheduling_strategy="SPREAD",
        )

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
            await asyncio.sleep(_WATCH_EVERY_S)
            nodes = alive_nodes()
            if nodes.keys() != self._last_change[0]:
                self._last_change = (frozenset(nodes), time.monotonic())
            lost = [name for name in self._nodes if name not in nodes]
            # What is lost in the midst of an update is found out there; otherwise the step is made to its end.
            if not lost or self._is_updating or not self.config.ray.elastic:
                continue
            if not has_room(nodes.values(), self.config, Sizes.of(self.config)):
                return RoomChangedError(f"node {', '.join(lost)} was lost")

    def _check_room_to_grow(self) -> None:
        """
        Raises:
            RoomChangedError: the run is smaller than it is to be, and there is room for more of it.
        """
        names, since_s = self._last_change
        if not self.shortfall or names <= self._nodes.keys() or time.monotonic() < since_s + _SETTLED_S:
            return
        nodes = alive_nodes()
        if largest(nodes.values(), self._inputs.config) != Sizes.of(self.config):
            joined = ", ".join(name for name in nodes if name not in self._nodes)
            raise RoomChangedError(f"node {joined} has joined")

    async def _watch(self) -> None:
        assert self._controllers is not None
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            self._stages = await self._controllers.stages()


async def _have(actors: list[Any], count: int, start: Callable[[], Any]) -> None:
    """Keep those engines that answer, and start what is missing."""
    if actors and count != len(actors):
        answers = await asyncio.gather(*(_answers(actor) for actor in actors))
        kept = [actor for actor, is_there in zip(actors, answers, strict=True) if is_there][:count]
        await asyncio.gather(*(end_engine_actor(a) for a in actors if a not in kept), return_exceptions=True)
        actors[:] = kept
    while len(actors) < count:
        actors.append(start())


async def _answers(actor: Any) -> bool:
    try:
        return await asyncio.wait_for(asyncio.ensure_future(actor.__ray_ready__.remote()), _ANSWER_TIMEOUT_S)
    except (RayError, TimeoutError):
        return False


def check_cluster(config: TrainConfig) -> None:
    """
    Raises:
        UserError: nobody answers at the address of the cluster.
    """
    found = re.fullmatch(r"(?:ray://)?(.+):(\d+)", _address(config))
    if found is None:
        return
    try:
        socket.create_connection((found[1], int(found[2])), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise UserError(
            f"ray.address is {_address(config)!r}: no Ray cluster answers there ({error}); HOST:PORT of its head is "
            "needed, or none for a new one on this machine"
        ) from error


def _address(config: TrainConfig) -> str:
    return config.ray.address or os.environ.get("RAY_ADDRESS", "")


def _connect(inputs: Inputs) -> None:
    """Connect to the cluster of the config or of RAY_ADDRESS, or start one on this machine with room for all."""
    config = inputs.config
    # What dies is told in a line of our own, in the place of Ray's paragraphs.
    logging.getLogger("ray").setLevel(logging.ERROR)
    setattr(ray_worker, "_worker_logs_enabled", False)  # noqa: B010 - private, and Ray has no other way
    if address := _address(config):
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError) as error:
            raise UserError(f"ray.address is {address!r}: no Ray cluster answers there ({error})") from error
        return
    num_engines = config.num_ray_engines + config.num_ray_judges
    num_processes = config.controllers + num_engines + config.trainer.num_processes
    num_cpus = max(os.cpu_count() or 1, round(num_processes * config.ray.cpus_per_process + 0.5))
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
