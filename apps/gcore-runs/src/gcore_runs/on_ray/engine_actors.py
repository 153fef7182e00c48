"""The actors of a run's engines: as many as are wanted of each role, of which those that are there stay."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gcore_rollout import Engine, EngineHandle, RayEngine, end_engine_actor, start_engine_actor
from gcore_runs.logs import logged
from gcore_runs.sizes import SizedConfig, Sizes

_ANSWER_TIMEOUT_S = 10.0


Role = Literal["engine", "judge"]


Factory = Callable[[], Engine[Any, Any]]
"""Makes an engine, in a process of its own."""

ConfigT = TypeVar("ConfigT", bound=SizedConfig)


class EngineActors(Generic[ConfigT]):
    """Actors with engines of the policy and, where a run has one, of the judge.

    Args:
        factories: for each role, what makes its engines with given settings.
        logs: folder of the files that their processes log to.

    Attributes:
        handles: Of each role's.
    """

    def __init__(self, factories: Mapping[Role, Callable[[ConfigT], Factory]], *, logs: Path) -> None:
        self.handles: dict[Role, list[EngineHandle]] = {role: [] for role in factories}
        self._factories = factories
        self._logs = logs
        self._num_made = dict.fromkeys(factories, 0)
        self._is_in_turns = False

    async def have(self, sizes: Sizes, config: ConfigT) -> None:
        """Have as many of each role as the sizes say.

        Those that answer stay; where a role has too many, they get an engine of the other one, in the same process. In
        turns, judges have actors of their own, each on the device of an engine.
        """
        wanted: dict[Role, int] = {"engine": sizes.engines, "judge": sizes.judges}
        if self._is_in_turns and any(len(handles) != wanted[role] for role, handles in self.handles.items()):
            await _end(self.handles["judge"])
            self.handles["judge"].clear()
        spare: list[EngineHandle] = []
        for role, handles in self.handles.items():
            # What judges beside others is on a device of its own no more.
            num_kept = 0 if role == "judge" and sizes.in_turns and not self._is_in_turns else wanted[role]
            if handles and len(handles) != num_kept:
                answers = await asyncio.gather(*map(_answers, handles))
                await _end([handle for handle, is_there in zip(handles, answers, strict=True) if not is_there])
                there = [handle for handle, is_there in zip(handles, answers, strict=True) if is_there]
                handles[:] = there[:num_kept]
                spare += there[num_kept:]
        self._is_in_turns = sizes.in_turns
        for role, handles in self.handles.items():
            while len(handles) < wanted[role]:
                factory = self._factory(role, config)
                if role == "judge" and sizes.in_turns:
                    handles.append(await self._start_beside(self.handles["engine"][len(handles)], factory, config))
                elif spare:
                    handles.append(spare.pop().becoming(factory))
                else:
                    handles.append(self._start(factory, config))
        await _end(spare)

    async def swap_seconds(self, config: ConfigT) -> float:
        """Measure what it takes to put one of each role to sleep and to wake it, while nobody uses them."""
        seconds = 0.0
        for first, *_ in self.handles.values():
            engine = await RayEngine.connect(first, start_timeout_s=config.ray.timeout_s)
            try:
                await engine.abort()
                start_s = time.monotonic()
                await engine.sleep()
                await engine.wake()
                seconds += time.monotonic() - start_s
            finally:
                await engine.close()
        return seconds

    async def close(self) -> None:
        """End them all."""
        await _end([handle for handles in self.handles.values() for handle in handles])

    def _factory(self, role: Role, config: ConfigT) -> Factory:
        number, self._num_made[role] = self._num_made[role], self._num_made[role] + 1
        return partial(logged, self._logs, role, number, self._factories[role](config))

    def _start(self, factory: Factory, config: ConfigT) -> EngineHandle:
        return start_engine_actor(
            factory,
            num_cpus=config.ray.cpus_per_process,
            num_gpus=config.ray.gpus_per_engine if config.device.startswith("cuda") else 0,
            num_threads=_num_threads(config),
            scheduling_strategy="SPREAD",
        )

    async def _start_beside(self, neighbour: EngineHandle, factory: Factory, config: ConfigT) -> EngineHandle:
        node, gpus = await neighbour.actor.__ray_call__.remote(_place)
        return start_engine_actor(
            partial(_on_gpus, gpus, factory),
            num_cpus=0,
            num_threads=_num_threads(config),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True),
        )


def _num_threads(config: SizedConfig) -> int:
    return max(1, config.threads // config.sizes.num_engine_devices)


def _place(actor: Any) -> tuple[str, list[str]]:
    """The node and the GPUs that an actor has."""
    del actor
    return ray.get_runtime_context().get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()]


def _on_gpus(gpus: Sequence[str], make: Factory) -> Engine[Any, Any]:
    """What is made where these are what CUDA sees; Ray hides those that a process has not reserved."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return make()


async def _end(handles: Sequence[EngineHandle]) -> None:
    await asyncio.gather(*map(end_engine_actor, handles), return_exceptions=True)


async def _answers(handle: EngineHandle) -> bool:
    try:
        return await asyncio.wait_for(asyncio.ensure_future(handle.actor.__ray_ready__.remote()), _ANSWER_TIMEOUT_S)
    except (RayError, TimeoutError):
        return False
