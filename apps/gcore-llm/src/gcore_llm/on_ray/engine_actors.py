"""The actors of a model's engines: as many as are wanted, of which those that are there stay."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ray.exceptions import RayError

from gcore_llm.config import TrainConfig
from gcore_llm.engines import engine_factory
from gcore_llm.logs import logged
from gcore_rollout import Engine
from gcore_rollout.ray_engine import end_engine_actor, start_engine_actor

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

    async def have(self, count: int, config: TrainConfig) -> None:
        """Keep those that answer, as far as they are wanted, and start what is missing."""
        if self.actors and count != len(self.actors):
            answers = await asyncio.gather(*(_answers(actor) for actor in self.actors))
            there = [actor for actor, is_there in zip(self.actors, answers, strict=True) if is_there]
            kept = there[:count]
            await _end([actor for actor in self.actors if actor not in kept])
            self.actors = kept
        while len(self.actors) < count:
            self.actors.append(self._start(config))

    async def close(self) -> None:
        """End them all."""
        await _end(self.actors)

    def _start(self, config: TrainConfig) -> Any:
        settings = config.rollout if self._role == "engine" else config.reward_model.judge
        factory: Callable[[], Engine] = engine_factory(
            settings, config, self._model.absolute(), eos_token_ids=self._eos_token_ids
        )
        number, self._num_made = self._num_made, self._num_made + 1
        return start_engine_actor(
            partial(logged, self._logs, self._role, number, factory),
            num_cpus=config.ray.cpus_per_process,
            num_gpus=config.ray.gpus_per_engine if config.device.startswith("cuda") else 0,
            num_threads=max(1, config.threads // (config.num_ray_engines + config.num_ray_judges)),
            scheduling_strategy="SPREAD",
        )


async def _end(actors: list[Any]) -> None:
    await asyncio.gather(*(end_engine_actor(actor) for actor in actors), return_exceptions=True)


async def _answers(actor: Any) -> bool:
    try:
        return await asyncio.wait_for(asyncio.ensure_future(actor.__ray_ready__.remote()), _ANSWER_TIMEOUT_S)
    except (RayError, TimeoutError):
        return False
