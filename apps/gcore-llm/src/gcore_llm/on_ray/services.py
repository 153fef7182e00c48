"""A run's services as actors of a Ray cluster, and their replacement when they die."""

import asyncio
import logging
import os
import re
import socket
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import ray
from ray._private import worker as ray_worker

from gcore_controller.errors import ControllerDiedError
from gcore_controller.ray_runtime import RayControllers
from gcore_llm.config import TrainConfig
from gcore_llm.engines import engine_factory
from gcore_llm.errors import RankError, UserError
from gcore_llm.logs import log_to, logs_of
from gcore_llm.on_ray.controller import Handles, Report, controller_program
from gcore_llm.on_ray.training_ranks import RayLearner
from gcore_llm.program import Job, Recorder
from gcore_llm.roles import eos_token_ids
from gcore_llm.services import Inputs
from gcore_rollout import Engine
from gcore_rollout.errors import EngineDiedError
from gcore_rollout.ray_engine import end_engine_actor, start_engine_actor

_CONNECT_TIMEOUT_S = 10.0
_WATCH_EVERY_S = 1.0


class RayServices:
    """Controllers, engines and training ranks on a Ray cluster; made by `start`.

    Attributes:
        learner: The models in training.
    """

    def __init__(
        self, inputs: Inputs, controllers: RayControllers, engines: list[Any], learner: RayLearner, logs: Path
    ) -> None:
        self.learner = learner
        self._logs = logs
        self._stages: Sequence[str | None] = []
        self._inputs = inputs
        self._controllers = controllers
        self._engines = engines

    @classmethod
    async def start(cls, inputs: Inputs, model: Path, checkpoints: Path) -> Self:
        """Start the actors of all roles, on the cluster that the config names or a new one on this machine.

        Raises:
            ClusterError: there is no room for them.
            UserError: the cluster cannot be reached.
        """
        config = inputs.config
        # What scores is started by each controller for itself.
        await inputs.rewards.close()
        _connect(inputs)
        controllers = await RayControllers.start(
            world_size=config.controllers, num_cpus=config.ray.cpus_per_process, start_timeout_s=config.ray.timeout_s
        )
        engines: list[Any] = []
        learner = RayLearner(config, model, checkpoints)
        logs = logs_of(checkpoints.absolute())
        try:
            eos = eos_token_ids(inputs.tokenizer, model)
            factory = engine_factory(config.rollout, config, model.absolute(), eos_token_ids=eos)
            num_engines = config.num_ray_engines
            for number in range(num_engines):
                engine = start_engine_actor(
                    partial(_logged, logs, number, factory),
                    num_cpus=config.ray.cpus_per_process,
                    num_gpus=config.ray.gpus_per_engine if config.device.startswith("cuda") else 0,
                    num_threads=max(1, config.threads // num_engines),
                    scheduling_strategy="SPREAD",
                )
                engines.append(engine)
            await learner.start()
        except BaseException:
            await cls(inputs, controllers, engines, learner, logs).close()
            raise
        return cls(inputs, controllers, engines, learner, logs)

    async def run(self, job: Job, recorder: Recorder) -> None:
        """See `Services.run`."""
        handles = Handles(
            engines=self._engines,
            ranks=self.learner.ranks,
            tokenizer=self._inputs.tokenizer,
            folder=Path.cwd(),
            logs=self._logs,
        )

        async def reported(rank: int, report: Report) -> None:
            del rank
            await getattr(recorder, report.method)(*report.arguments)

        watching = asyncio.create_task(self._watch())
        try:
            await self._controllers.run(controller_program(job), roles=handles, reported=reported)
        finally:
            watching.cancel()

    def stages(self) -> Sequence[str | None]:
        """See `Services.stages`."""
        return self._stages

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            self._stages = await self._controllers.stages()

    async def recover(self, error: Exception, *, keeps_models: bool) -> str:
        """See `Services.recover`."""
        match error:
            case ControllerDiedError():
                done = "another takes its slice over"
            case EngineDiedError():
                done = "they were started anew"
            case RankError():
                done = "all training ranks were started anew"
            case _:
                raise error
        if not keeps_models:
            await self.learner.start()
        return f"{error}; {done}"

    async def close(self) -> None:
        """See `Services.close`."""
        try:
            self.learner.close()
        finally:
            await asyncio.gather(*(end_engine_actor(engine) for engine in self._engines), return_exceptions=True)
            await self._controllers.close()
            ray.shutdown()


def _logged(logs: Path, number: int, factory: Callable[[], Engine]) -> Engine:
    """An engine whose process logs in the run's folder."""
    log_to(logs, "engine", number, redirect=True)
    return factory()


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
    num_processes = config.controllers + config.num_ray_engines + config.trainer.num_processes
    num_cpus = max(os.cpu_count() or 1, round(num_processes * config.ray.cpus_per_process + 0.5))
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
