"""The actors of a run's engines and judges, which are started, resized and replaced."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import Any, Generic, Literal, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gcore_controller.runtimes.backend import SizedConfig, Sizes
from gcore_controller.runtimes.ray.actors import answers_in_time

_ANSWER_TIMEOUT_S = 10.0

ActorRole = Literal["engine", "judge"]

Factory = Callable[[], Any]
"""Builds an engine in a process of its own."""

ConfigT = TypeVar("ConfigT", bound=SizedConfig)


@dataclass(eq=False)
class RoleActors(Generic[ConfigT]):
    """Actors with engines of the policy and, if the run has one, of the judge."""

    roles: InitVar[Sequence[ActorRole]]
    """Roles that the run has."""
    factory: Callable[[ActorRole, ConfigT, int], Factory]
    """Return what builds the engine of a role and number with these settings."""
    _: KW_ONLY
    start: Callable[..., Any]
    """Start an actor with the engine of a factory, and return a picklable handle: its ``actor`` is that of Ray, and
    ``becoming(factory)`` one of the same actor whose next client replaces its engine. Called with ``num_threads`` of
    torch, and options of Ray's actors."""
    end: Callable[[Any], Awaitable[None]]
    """End an actor."""
    connect: Callable[..., Awaitable[Any]]
    """Return an actor's engine, once it is ready, within ``start_timeout_s``: it can abort, sleep and wake."""

    def __post_init__(self, roles: Sequence[ActorRole]) -> None:
        self.handles: dict[ActorRole, list[Any]] = {role: [] for role in roles}
        """The handles of each role's actors."""
        self._num_made = dict.fromkeys(roles, 0)
        self._is_in_turns = False

    async def resize(self, sizes: Sizes, config: ConfigT) -> None:
        """Bring the number of each role's actors to the sizes, and replace those that have died.

        Actors that answer stay. Where a role has too many, they get an engine of the other role, in the same process.
        In turns, judges have actors of their own, each on the device of an engine.
        """
        wanted: dict[ActorRole, int] = {"engine": sizes.engines, "judge": sizes.judges}
        if self._is_in_turns and any(len(handles) != wanted[role] for role, handles in self.handles.items()):
            await self._end(self.handles["judge"])
            self.handles["judge"].clear()
        spare: list[Any] = []
        for role, handles in self.handles.items():
            # Judges that are to share devices with engines give up their own.
            num_kept = 0 if role == "judge" and sizes.in_turns and not self._is_in_turns else wanted[role]
            if handles and len(handles) != num_kept:
                answers = await answers_in_time([h.actor.__ray_ready__.remote() for h in handles], _ANSWER_TIMEOUT_S)
                await self._end([handle for handle, is_there in zip(handles, answers, strict=True) if not is_there])
                there = [handle for handle, is_there in zip(handles, answers, strict=True) if is_there]
                handles[:] = there[:num_kept]
                spare += there[num_kept:]
        self._is_in_turns = sizes.in_turns
        for role, handles in self.handles.items():
            while len(handles) < wanted[role]:
                factory = self.factory(role, config, self._num_made[role])
                self._num_made[role] += 1
                neighbour = self.handles["engine"][len(handles)] if role == "judge" and sizes.in_turns else None
                if spare and neighbour is None:
                    handles.append(spare.pop().becoming(factory))
                else:
                    handles.append(await self._started(factory, config, neighbour))
        await self._end(spare)

    async def swap_seconds(self, config: ConfigT) -> float:
        """Measure how long it takes to put one engine of each role to sleep and to wake it, while none is in use."""
        seconds = 0.0
        for first, *_ in self.handles.values():
            engine = await self.connect(first, start_timeout_s=config.ray.timeout_s)
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
        """End all actors."""
        await self._end([handle for handles in self.handles.values() for handle in handles])

    async def _started(self, factory: Factory, config: ConfigT, neighbour: Any) -> Any:
        """Start an actor, on the device of a neighbour if it has one."""
        num_threads = max(1, config.threads // config.sizes.num_engine_devices)
        if neighbour is not None:
            node, gpus = await neighbour.actor.__ray_call__.remote(_place)
            place = NodeAffinitySchedulingStrategy(node, soft=True)
            factory = partial(_on_gpus, gpus, factory)
            return self.start(factory, num_cpus=0, num_threads=num_threads, scheduling_strategy=place)
        return self.start(
            factory,
            num_cpus=config.ray.cpus_per_process,
            num_gpus=config.ray.gpus_per_engine if config.device.startswith("cuda") else 0,
            num_threads=num_threads,
            scheduling_strategy="SPREAD",
        )

    async def _end(self, handles: Sequence[Any]) -> None:
        await asyncio.gather(*map(self.end, handles), return_exceptions=True)


def _place(actor: Any) -> tuple[str, list[str]]:
    """Return the node and the GPUs of an actor."""
    del actor
    return ray.get_runtime_context().get_node_id(), [str(gpu) for gpu in ray.get_gpu_ids()]


def _on_gpus(gpus: Sequence[str], make: Factory) -> Any:
    """Build an engine where CUDA sees these GPUs; Ray hides those that a process has not reserved."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return make()
