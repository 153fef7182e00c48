"""Ray's actors: calls made together, whose errors say which actor died and of what; those of engines and judges."""

import asyncio
import math
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from gcore_controller.errors import ClusterError, ControllerDiedError, ControllerError
from gcore_controller.hangs import DUMP_S, describe_end, inspect_process, limit_s
from gcore_controller.runtimes.backend import LENT, SizedConfig, Sizes
from gcore_controller.runtimes.ray.cluster import free_resources
from gcore_controller.runtimes.ray.devices import ReservedDevice

_ANSWER_TIMEOUT_S = 10.0
_LOOK_S = 60.0
"""How long processes on all nodes, which look at those that do not answer, may take to start and to look."""
_RETRY_S = 0.1
_HEARTBEAT_EVERY_S = 1.0
"""Time between two looks at the heartbeats of actors."""
_NEWS_S = 5.0
"""How long an actor's error waits for news of another one's death."""
_DEATH_NEWS_S = 120.0
"""The same of an error that says that an actor died; the loss of a node is noticed late."""

_DEATHS = {
    "SYSTEM_ERROR": "it was killed, ran out of memory, or crashed",
    "NODE_DIED": "its node is lost",
    "NODE_OUT_OF_MEMORY": "its node ran out of memory",
}

ActorRole = str
"""``engine``, of the policy, ``lent``, of the policy on the devices of ranks that are lent, or a judge's: ``judge``, or
``judge_`` and a name of its own."""
Factory = Callable[[], Any]
"""Builds an engine in a process of its own."""
ConfigT = TypeVar("ConfigT", bound=SizedConfig)


@dataclass(frozen=True)
class ActorGroup:
    """Actors that are called together, such as the controllers of a run.

    They have a method ``is_alive`` that answers whatever they do.
    """

    actors: Sequence[Any] = ()
    locations: Sequence[str] = ()
    """Process and node of each actor, in words; empty: they have not started."""
    _: KW_ONLY
    noun: str = "controller"
    """The word for one of them."""
    death_error: type[ControllerError] = ControllerDiedError
    heartbeat_timeout_s: float = 120.0
    """How long an actor may leave ``is_alive`` unanswered, once it has started, until it counts as lost."""
    logs: Sequence[str] = ()
    """The file that the standard error of each goes to; empty: it is not known."""
    longest_s: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of the longest call of each stage."""

    def failure(self, rank: int, error: BaseException) -> BaseException:
        """Return the error to raise where a call of an actor raised this one."""
        cause = cause_of(error)
        cause.add_note(f"raised by {self.name(rank)}:\n{error}")
        return cause

    def name(self, rank: int) -> str:
        """Return which actor it is, and where."""
        location = "which had not started"
        if self.locations:
            location = self.locations[rank]
        return f"{self.noun} {rank}, {location},"

    def death(self, rank: int, error: RayActorError) -> ControllerError:
        """Return the error that says how an actor died, and what it logged last, if this process can read that."""
        end = ""
        if self.logs:
            end = describe_end(self.logs[rank], self.locations[rank].split()[1])
        return self.death_error(f"{self.name(rank)} died: {_reason_of(error)}{end}")

    async def hang(self, ranks: Sequence[int], problem: str) -> ControllerError:
        """Return the error that says which actors do not answer, and why, once all have written their stacks."""
        looks = map(self._inspect, range(len(self.actors)))
        states = await answers_in_time(looks, timeout_s=_LOOK_S)
        await asyncio.sleep(DUMP_S)
        lines: list[str] = []
        for rank in ranks:
            state = states[rank] or "its node does not answer"
            lines.append(f"{self.name(rank)} {problem}: {state}")
        return self.death_error("; ".join(lines))

    async def _inspect(self, rank: int) -> str:
        """Have a process on an actor's node look at it."""
        _, pid, _, host = self.locations[rank].split()
        nodes = [node for node in ray.nodes() if node["NodeManagerAddress"] == host]
        on_node = NodeAffinitySchedulingStrategy(nodes[-1]["NodeID"], soft=False)
        remote: Any = ray.remote
        inspect = remote(inspect_process).options(num_cpus=0, scheduling_strategy=on_node)
        return await inspect.remote(int(pid))

    async def call(
        self,
        method: str,
        *args: Any,
        ranks: Sequence[int] | None = None,
        stage: str = "",
        **options: Any,
    ) -> dict[int, Any]:
        """Call a method of all actors, or of those with these ranks, and return their `answers`."""
        calls: dict[int, Any] = {}
        for rank, actor in enumerate(self.actors):
            if ranks is None or rank in ranks:
                calls[rank] = getattr(actor, method).remote(*args, **options)
        return await self.answers(calls, stage)

    async def answers(self, calls: Mapping[int, Any], stage: str = "") -> dict[int, Any]:
        """Wait for the answers to calls of some actors, by rank; without a ``stage`` they may take any time.

        Raises:
            Exception: the first cause of an error: the `death` or `hang` of an actor, or else the first `failure`.
        """
        replies = {rank: future_of(call) for rank, call in calls.items()}
        await self._wait(replies, stage)
        errors = _errors(replies)
        if errors:
            rank, error = next(iter(errors.items()))
            for dead, death in {**errors, **await self._news(errors)}.items():
                if isinstance(death, RayActorError) and _is_death(death):
                    raise self.death(dead, death) from None
            raise self.failure(rank, error) from None
        return {rank: reply.result() for rank, reply in replies.items()}

    async def _wait(self, replies: "Mapping[int, asyncio.Future[Any]]", stage: str) -> None:
        """Wait for all answers, or for one that is an error; raise `hang` if an actor does not answer."""
        pending = set(replies.values())
        heartbeats: dict[int, Any] = {}
        limit = limit_s(stage, self.longest_s, self.heartbeat_timeout_s)
        # Looks are counted, and not time: this process may have been stopped meanwhile.
        waited_s = 0.0
        silent_s = 0.0
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=_HEARTBEAT_EVERY_S, return_when=asyncio.FIRST_EXCEPTION
            )
            if any(reply.exception() is not None for reply in done):
                return
            if not pending or not self.locations:
                # Actors that have not started may wait for capacity.
                continue
            waited_s += _HEARTBEAT_EVERY_S
            silent_s += _HEARTBEAT_EVERY_S
            silent = [rank for rank, heartbeat in heartbeats.items() if not heartbeat.done()]
            if not silent:
                silent_s = 0.0
                for rank, actor in enumerate(self.actors):
                    heartbeats[rank] = actor.is_alive.remote().future()
            if silent_s >= self.heartbeat_timeout_s:
                problem = f"gave no sign of life for {self.heartbeat_timeout_s:g} s"
                raise await self.hang(silent, f"{problem} in {stage or 'the program'}")
            if stage and waited_s >= limit:
                hung = [rank for rank, reply in replies.items() if not reply.done()]
                raise await self.hang(hung, f"gave no answer to {stage} within {limit:g} s")
        self.longest_s[stage] = max(waited_s, self.longest_s.get(stage, 0.0))

    async def _news(self, errors: Mapping[int, BaseException]) -> Mapping[int, BaseException]:
        """Return deaths of actors; one that misses another may report it before that one's death is known."""
        if any(map(_is_death, errors.values())):
            return {}
        news = {rank: future_of(actor.is_alive.remote()) for rank, actor in enumerate(self.actors)}
        misses_actor = any(isinstance(cause_of(error), RayActorError) for error in errors.values())
        timeout_s = _DEATH_NEWS_S if misses_actor else _NEWS_S
        await asyncio.wait(news.values(), timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        return _errors(news)


def future_of(call: Any) -> "asyncio.Future[Any]":
    """Return a future of the answer to an actor's call, whose error is not missed if nothing waits for it."""
    future = asyncio.ensure_future(call)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


async def answers_in_time(
    calls: Iterable[Any], *, timeout_s: float = _ANSWER_TIMEOUT_S
) -> list[Any]:
    """Return the answers to calls of actors; None for each that fails or takes long."""
    replies = [future_of(call) for call in calls]
    if replies:
        await asyncio.wait(replies, timeout=timeout_s)
    answers: list[Any] = []
    for reply in replies:
        has_answer = reply.done() and not reply.exception()
        answers.append(reply.result() if has_answer else None)
    return answers


def cause_of(error: BaseException) -> BaseException:
    """Return the error that was raised in the other process."""
    return error.cause if isinstance(error, RayTaskError) else error


def _errors(replies: "Mapping[int, asyncio.Future[Any]]") -> dict[int, BaseException]:
    """Return the errors of those that are done."""
    errors: dict[int, BaseException] = {}
    for rank, reply in replies.items():
        error = reply.exception() if reply.done() else None
        if error is not None:
            errors[rank] = error
    return errors


def _is_death(error: BaseException) -> bool:
    """Return whether the actor itself died; if it raised the error of another's death, that has both types."""
    return isinstance(error, RayActorError) and not isinstance(error, RayTaskError)


def _reason_of(error: RayActorError) -> str:
    """Return in a few words why an actor died."""
    if isinstance(error, ActorUnavailableError):
        return "it cannot be reached"
    match = re.search(r"exit type: (\w+)", str(error))
    if match is not None and match[1] in _DEATHS:
        return _DEATHS[match[1]]
    return str(error).strip().rpartition("\n")[2]


@dataclass(eq=False)
class RoleActors(Generic[ConfigT]):
    """Actors with engines of the policy and of the judges that the run has.

    Example:
        >>> from unittest.mock import AsyncMock, Mock
        >>> hooks = {"start": Mock(), "end": AsyncMock(), "put_to_sleep": AsyncMock(), "connect": AsyncMock()}
        >>> actors = RoleActors(["engine", "judge"], Mock(), **hooks)
        >>> sizes = Sizes(controllers=1, engines=4, judges={"judge": 2}, ranks=1)
        >>> resources = Mock(gpus_per_engine=0.0)
        >>> asyncio.run(actors.resize(sizes, Mock(ray=resources, sizes=sizes, threads=8, device="cpu")))
        >>> {role: len(handles) for role, handles in actors.handles.items()}
        {'engine': 4, 'judge': 2}
    """

    roles: InitVar[Sequence[ActorRole]]
    """Roles that the run has."""
    factory: Callable[[ActorRole, ConfigT, tuple[ActorRole, int]], Factory]
    """Return what builds the engine of a role with these settings, in the process of a role and number."""
    _: KW_ONLY
    start: Callable[..., Any]
    """Start an actor with the engine of a factory, and return a picklable handle: its ``actor`` is that of Ray, and
    ``becoming(factory)`` one of the same actor whose next client replaces its engine, and ``lendable(role, others)``
    one of this role that knows the engines of others, too. Called with ``num_threads`` of torch, and options of Ray's
    actors."""
    end: Callable[[Any], Awaitable[None]]
    """End an actor."""
    put_to_sleep: Callable[[Any], Awaitable[None]]
    """Put the engine of an actor to sleep, if it has been made."""
    connect: Callable[..., Awaitable[Any]]
    """Return an actor's engine, once it is ready, within ``start_timeout_s``: it can abort, sleep and wake."""

    def __post_init__(self, roles: Sequence[ActorRole]) -> None:
        self.handles: dict[ActorRole, list[Any]] = {role: [] for role in roles}
        """The handles of each role's actors."""
        self._num_made = dict.fromkeys(roles, 0)
        self._is_in_turns = False

    async def resize(self, sizes: Sizes, config: ConfigT) -> None:
        """Bring the number of each role's actors to the sizes, and replace those that have died.

        Actors that answer stay. Where a role has too many, they get an engine of another role, in the same process.
        In turns, judges have actors of their own, each on the device of an engine.
        """
        target_sizes: dict[ActorRole, int] = {
            "engine": sizes.engines,
            LENT: sizes.num_lent,
            **sizes.judges,
        }
        if self._is_in_turns:
            present_sizes = {role: len(handles) for role, handles in self.handles.items()}
            has_changed = present_sizes.items() - target_sizes.items()
            # Their nodes may be lost, and they start on no other; nor do they follow an engine that did.
            if has_changed or await self._have_moved():
                for judges in self.judges.values():
                    await self._end(judges)
                    judges.clear()
        spare: list[Any] = []
        for role, handles in self.handles.items():
            num_kept = target_sizes[role]
            if role != "engine" and sizes.in_turns and not self._is_in_turns:
                # Judges that are to share devices with engines give up their own.
                num_kept = 0
            if handles and len(handles) != num_kept:
                await self._end_dead(handles)
                spare += handles[num_kept:]
                del handles[num_kept:]
        self._is_in_turns = sizes.in_turns
        for role, handles in self.handles.items():
            while len(handles) < target_sizes[role]:
                process = role, self._num_made[role]
                factory = self.factory(role, config, process)
                self._num_made[role] += 1
                neighbour = None
                if role != "engine" and sizes.in_turns:
                    neighbour = self.handles["engine"][len(handles)]
                if spare and neighbour is None:
                    handle = spare.pop().becoming(factory)
                else:
                    handle = await self._start_actor(factory, config, neighbour)
                other_engines: dict[ActorRole, Factory] = {}
                if role != LENT and not sizes.in_turns:
                    for other_role in self.handles:
                        if other_role not in (role, LENT):
                            other_engines[other_role] = self.factory(other_role, config, process)
                handles.append(handle.lendable(role, other_engines))
        await self._end(spare)

    async def _end_dead(self, handles: list[Any]) -> None:
        """End the actors that do not answer, and remove them from the list."""
        answers = await answers_in_time([h.actor.__ray_ready__.remote() for h in handles])
        dead: list[Any] = []
        alive: list[Any] = []
        for handle, answer in zip(handles, answers, strict=True):
            if answer:
                alive.append(handle)
            else:
                dead.append(handle)
        await self._end(dead)
        handles[:] = alive

    @property
    def judges(self) -> dict[ActorRole, list[Any]]:
        """The handles of each judge's actors, by role."""
        judges = dict(self.handles)
        judges.pop("engine", None)
        judges.pop(LENT, None)
        return judges

    async def _have_moved(self) -> bool:
        """Return whether a judge is not there, or on another node than the engine whose device it shares."""
        calls: list[Any] = []
        for judges in self.judges.values():
            for judge, engine in zip(judges, self.handles["engine"], strict=True):
                calls.append(judge.actor.__ray_call__.remote(ReservedDevice.of_actor))
                calls.append(engine.actor.__ray_call__.remote(ReservedDevice.of_actor))
        devices = await answers_in_time(calls)
        for judge, engine in zip(devices[::2], devices[1::2], strict=True):
            if judge is None or engine is None or judge.node != engine.node:
                return True
        return False

    async def devices(self) -> list[ReservedDevice]:
        """Return the devices of the actors once they have started, in the order of `share_devices`."""
        handles = [*self.handles["engine"]]
        if not self._is_in_turns:
            # With one judge, the last engines of the policy become the last of the judge.
            handles += reversed([*chain.from_iterable(self.judges.values())])
        handles += self.handles.get(LENT, [])
        calls = [handle.actor.__ray_call__.remote(ReservedDevice.of_actor) for handle in handles]
        return await asyncio.gather(*calls)

    async def end_turn(self, *, timeout_s: float) -> None:
        """Put the engines on devices of ranks to sleep; those that do not answer in time have died."""
        asleep = [future_of(self.put_to_sleep(handle)) for handle in self._with_ranks]
        if asleep:
            await asyncio.wait(asleep, timeout=timeout_s)

    async def sleep(self, *, timeout_s: float) -> None:
        """Put the engines on devices of ranks to sleep, once they are ready, with the weights that they have."""
        await asyncio.gather(*(self._sleep(handle, timeout_s) for handle in self._with_ranks))

    @property
    def _with_ranks(self) -> list[Any]:
        """The handles of the engines that take turns with ranks: the lent ones or, without any, those of all roles."""
        if LENT in self.handles:
            return self.handles[LENT]
        return list(chain.from_iterable(self.handles.values()))

    async def _sleep(self, handle: Any, timeout_s: float) -> None:
        engine = await self.connect(handle, start_timeout_s=timeout_s)
        try:
            await engine.abort()
            await engine.sleep()
        finally:
            await engine.close()

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
        await self._end(list(chain.from_iterable(self.handles.values())))

    async def _start_actor(self, factory: Factory, config: ConfigT, neighbour: Any) -> Any:
        """Start an actor, on the device of a neighbour if it has one."""
        num_nodes = sum(node["Alive"] for node in ray.nodes()) if ray.is_initialized() else 1
        # They are spread over the nodes.
        num_here = math.ceil(config.sizes.num_engine_places / num_nodes)
        num_threads = max(1, config.threads // num_here)
        size = config.sizes.devices_per_engine
        if neighbour is not None:
            device = await _wait_for_device(neighbour, config.ray.timeout_s)
            factory = partial(_on_gpus, device.gpus, factory)
            return self.start(factory, num_threads=num_threads, **device.options)
        return self.start(
            factory,
            # All of an actor's resources are those of one node.
            num_cpus=size,
            num_gpus=config.ray.gpus_per_engine * size if config.device.startswith("cuda") else 0,
            num_threads=num_threads,
            scheduling_strategy="SPREAD",
        )

    async def _end(self, handles: Sequence[Any]) -> None:
        await asyncio.gather(*map(self.end, handles), return_exceptions=True)


async def _wait_for_device(handle: Any, timeout_s: float) -> ReservedDevice:
    """Return the device of an actor once it runs: Ray may be restarting it, on another node."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while True:
                with suppress(ActorUnavailableError):
                    return await handle.actor.__ray_call__.remote(ReservedDevice.of_actor)
                await asyncio.sleep(_RETRY_S)
    raise ClusterError(
        f"an engine that died was not restarted within {timeout_s} s: free are {free_resources()}"
    )


def _on_gpus(gpus: Sequence[str], make: Factory) -> Any:
    """Build an engine where CUDA sees these GPUs; Ray hides those that a process has not reserved."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return make()
