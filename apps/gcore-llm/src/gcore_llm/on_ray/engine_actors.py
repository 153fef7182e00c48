"""The actors of a model's engines: as many as are wanted, of which those that are there stay."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gcore_llm.config import TrainConfig
from gcore_llm.engines import engine_factory
from gcore_llm.on_ray.room import Sizes
from gcore_rollout import Engine
from gcore_rollout.ray_engine import RayEngine, end_engine_actor, start_engine_actor
from gcore_runs.logs import logged

_ANSWER_TIMEOUT_S = 10.0


class EngineActors:
    """Engines of the policy or of the judge.

    Args:
        eos_token_ids: what ends a response.
        logs: folder of the files that their processes log to.

    Attributes:
        actors: Their handles.
    """

    def __init__(self, role: Literal["engine", "judge"], model: Path, *, eos_token_ids: list[int], logs: Path) -> None:
        self.actors: list[Any] = []
        self._role = role
        self._model = model
        self._eos_token_ids = eos_token_ids
        self._logs = logs
        self._num_made = 0

    async def have(self, count: int, config: TrainConfig, *, beside: Sequence[Any] = ()) -> None:
        """Keep those that answer, as far as they are wanted, and start what is missing.

        Args:
            beside: actors on whose devices they are to be, one on each; none: on devices of their own.
        """
        if self.actors and count != len(self.actors):
            answers = await asyncio.gather(*(_answers(actor) for actor in self.actors))
            there = [actor for actor, is_there in zip(self.actors, answers, strict=True) if is_there]
            kept = there[:count]
            await _end([actor for actor in self.actors if actor not in kept])
            self.actors = kept
        while len(self.actors) < count:
            self.actors.append(await self._start(config, *beside[len(self.actors) : len(self.actors) + 1]))

    async def swap_seconds(self, config: TrainConfig) -> float:
        """Measure what it takes to put one of them to sleep and to wake it, while nobody uses it."""
        engine = await RayEngine.connect(self.actors[0], start_timeout_s=config.ray.timeout_s)
        try:
            await engine.abort()
            start_s = time.monotonic()
            await engine.sleep()
            await engine.wake()
            return time.monotonic() - start_s
        finally:
            await engine.close()

    async def close(self) -> None:
        """End them all."""
        await _end(self.actors)

    async def _start(self, config: TrainConfig, neighbour: Any = None) -> Any:
        settings = config.rollout if self._role == "engine" else config.reward_model.judge
        factory: Callable[[], Engine] = engine_factory(
            settings, config, self._model.absolute(), eos_token_ids=self._eos_token_ids
        )
        number, self._num_made = self._num_made, self._num_made + 1
        factory = partial(logged, self._logs, self._role, number, factory)
        num_threads = max(1, config.threads // Sizes.of(config).num_engine_devices)
        if neighbour is not None:
            node, gpus = await neighbour.__ray_call__.remote(_place)
            return start_engine_actor(
                partial(_on_gpus, gpus, factory),
                num_cpus=0,
                num_threads=num_threads,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
            )
        return start_engine_actor(
            factory,
            num_cpus=config.ray.cpus_per_process,
            num_gpus=config.ray.gpus_per_engine if config.device.startswith("cuda") else 0,
            num_threads=num_threads,
            scheduling_strategy="SPREAD",
        )


def _place(actor: Any) -> tuple[str, list[str]]:
    """The node and the GPUs that an actor has."""
    del actor
    return ray.get_runtime_context().get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()]


def _on_gpus(gpus: Sequence[str], make: Callable[[], Engine]) -> Engine:
    """What is made where these are what CUDA sees; Ray hides those that a process has not reserved."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return make()


async def _end(actors: list[Any]) -> None:
    await asyncio.gather(*(end_engine_actor(actor) for actor in actors), return_exceptions=True)


async def _answers(actor: Any) -> bool:
    try:
        return await asyncio.wait_for(asyncio.ensure_future(actor.__ray_ready__.remote()), _ANSWER_TIMEOUT_S)
    except (RayError, TimeoutError):
        return False
