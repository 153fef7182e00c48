"""Client of an engine in an actor of a Ray cluster, with weights passed by reference."""

import asyncio
import pickle
import platform
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Self
from uuid import uuid4

import torch

from gcore_rollout.engines.protocol import Engine, EngineStats, RequestT, SampleT
from gcore_rollout.engines.registry import PRELOAD_HF
from gcore_rollout.engines.remote.client import END_TIMEOUT_S, RemoteEngine, check_start_options
from gcore_rollout.engines.remote.ray_actor import EngineActor, Incarnation
from gcore_rollout.engines.remote.session import (
    CallFailed,
    EngineCall,
    Setup,
    rebuild_exception,
    updates_weights,
)
from gcore_rollout.errors import EngineDiedError, EngineStartError, make_extra_error
from gcore_rollout.weight_sync.history import WeightHistory
from gcore_rollout.weight_sync.weight_references import WeightReferences

# Not before `weight_references`, which sets Ray's environment.
try:
    import ray
    from ray import cloudpickle
    from ray.exceptions import ActorUnavailableError, RayActorError, RayError
except ImportError as error:
    raise make_extra_error("ray", "ray") from error

_MAX_CONCURRENCY = 100_000
_MAX_STARTS = 3
_RETRY_S = 0.1
_END_POLL_S = 0.02
_NEWS = "news"
"""The concurrency group of the call that is answered while the actor's event loop is blocked: it has a thread."""

Factory = Callable[[], Engine[Any, Any] | Awaitable[Engine[Any, Any]]]


@dataclass(frozen=True)
class EngineHandle:
    """An actor of a Ray cluster and the factory of its engine; can be passed to other processes of the cluster.

    Made by `start`.

    Example:
        >>> from functools import partial
        >>> judge = partial(HFEngine.from_pretrained, "model")
        >>> handle = EngineHandle(actor=None, factory=b"makes the policy").lendable("policy", {"judge": judge})
        >>> sorted(handle.factories)
        ['judge', 'policy']
        >>> handle.lent("judge").lent("policy").factory
        b'makes the policy'
    """

    actor: Any
    factory: bytes
    """Makes the engine there; pickled by value."""
    factories: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    """Make the engines of each role that the actor can have; none: it is not to be lent."""

    @classmethod
    def start(
        cls,
        factory: Factory,
        *,
        num_threads: int | None = None,
        changes_role: bool = False,
        keeps_asleep: bool = False,
        preload: tuple[str, ...] = PRELOAD_HF,
        **options: Any,
    ) -> Self:
        """Start an actor for an engine, which is made by the first `RayEngine.connect`.

        It ends with the process that calls this, or by `end`. After any other end Ray restarts it, with a new engine of
        the same factory, for clients that connect again.

        Args:
            factory: makes the engine there; a function that Ray can pickle, such as
                ``partial(HFEngine.from_pretrained, path)``.
            num_threads: of torch on CPU; default: what Ray gives it.
            changes_role: whether the actor is to have other engines, too, by `lent` or `becoming`. Each is then in a
                process of its own, a child of the actor's.
            keeps_asleep: with ``changes_role``, an engine that is followed by one of a `lent` handle sleeps, and wakes
                when a client connects by its handle again, with the weights that it had. Otherwise it ends.
            preload: modules that a process of each engine's own needs; see `EngineProcess.start`.
            options: of `ray.remote`, such as num_cpus (default: 1), num_gpus, resources, name and scheduling_strategy.
        """
        check_start_options(num_threads=num_threads)
        make: Any = ray.remote(concurrency_groups={_NEWS: 1})(EngineActor)  # pyright: ignore[reportCallIssue, reportUnknownMemberType]
        fixed = {"max_restarts": -1, "max_concurrency": _MAX_CONCURRENCY}
        options = {"num_cpus": 1.0, **options, **fixed}
        actor = make.options(**options).remote(
            num_threads, changes_role=changes_role, keeps_asleep=keeps_asleep, preload=preload
        )
        return cls(actor, _pickle_factory(factory))

    def lendable(self, role: str, others: Mapping[str, Factory]) -> "EngineHandle":
        """Return a handle of the same actor, whose engine is of this role, that can also be `lent` to others."""
        factories = {role: self.factory}
        for name, factory in others.items():
            factories[name] = _pickle_factory(factory)
        return replace(self, factories=factories)

    def lent(self, role: str) -> "EngineHandle":
        """Return a handle of the same actor with its engine of another role, as by `becoming`."""
        return replace(self, factory=self.factories[role])

    def becoming(self, factory: Factory) -> "EngineHandle":
        """Return a handle of the same actor with another engine, to change its role on the same device.

        The first client that connects by the result ends the current engine, which is then dead for its clients. They,
        too, must connect by the new handle from then on.
        """
        return replace(self, factory=_pickle_factory(factory), factories={})

    async def sleep(self) -> None:
        """Put the engine of the actor to sleep, if there is one; unlike a client, this makes none."""
        await self.actor.sleep.remote()

    async def end(self) -> None:
        """Close the actor's engine and end the actor for good, even while it generates. Idempotent."""
        try:
            with suppress(TimeoutError, RayActorError):
                await asyncio.wait_for(self.actor.close.remote(), END_TIMEOUT_S)
        finally:
            ray.kill(self.actor)
        # Until it is dead, it answers.
        with suppress(TimeoutError, RayActorError):
            async with asyncio.timeout(END_TIMEOUT_S):
                while True:
                    await self.actor.incarnation.remote()
                    await asyncio.sleep(_END_POLL_S)


class RayEngine(RemoteEngine[RequestT, SampleT]):
    """A client of an engine that a Ray actor runs; made by `connect`. See `RemoteEngine`.

    Several clients may share an actor. Each gets its own samples; `pause`, `update_weights` and `abort` act on those of
    all clients. The unfinished samples of a client that closed, or whose process died, are abandoned.

    A client of an actor that died stays dead, even if Ray has restarted the actor: `connect` again, to an engine with
    the weights that its factory gave it. The client is bound to the event loop in which it was connected.

    Attributes:
        handle: The handle of the actor.
        making_s: Seconds that it took the actor to make the engine.

    Example:
        >>> from functools import partial
        >>> async def count_tokens(path: str, request: Request) -> int:
        ...     handle = EngineHandle.start(partial(HFEngine.from_pretrained, path), num_cpus=2)
        ...     engine = await RayEngine.connect(handle)
        ...     num_tokens = sum([completion.work async for completion in engine.generate([request])])
        ...     await engine.close()
        ...     await handle.end()
        ...     return num_tokens
    """

    _HOW_TO_OPEN = "connect again"

    def __init__(
        self,
        handle: EngineHandle,
        incarnation: Incarnation,
        stats: EngineStats,
        *,
        heartbeat_timeout_s: float,
    ) -> None:
        super().__init__(incarnation.pid, heartbeat_timeout_s=heartbeat_timeout_s)
        self.handle = handle
        self.making_s = incarnation.making_s
        self._actor = handle.actor
        self._incarnation = incarnation
        self._is_local = incarnation.host == platform.node()
        self._stats = stats
        self._client = uuid4().hex
        self._numbers = count()
        self._life = asyncio.create_task(self._receive())
        self._watcher = asyncio.create_task(self._watch())

    @classmethod
    async def connect(
        cls,
        handle: EngineHandle,
        *,
        start_timeout_s: float = 600.0,
        heartbeat_timeout_s: float = 120.0,
    ) -> Self:
        """Wait until an actor's engine is made, and return a client of it.

        Args:
            handle: from `EngineHandle.start`.
            heartbeat_timeout_s: how long the actor may be silent; it waits twelve times as long for this client.

        Raises:
            EngineStartError: it was not ready in time.
            EngineDiedError: the actor was ended, or its process died repeatedly before the engine was made.
            Exception: what the factory raised.
        """
        check_start_options(heartbeat_timeout_s=heartbeat_timeout_s)
        try:
            async with asyncio.timeout(start_timeout_s):
                incarnation, answer = await cls._make(handle)
        except TimeoutError as error:
            raise EngineStartError(
                f"the engine actor was not ready after {start_timeout_s} s: free are {ray.available_resources()}"
            ) from error
        except RayActorError as error:
            raise EngineDiedError(
                f"the engine actor died before it was ready: {_explain_end(error)}"
            ) from error
        if isinstance(answer, CallFailed):
            raise rebuild_exception(answer, incarnation.pid)
        return cls(handle, *answer, heartbeat_timeout_s=heartbeat_timeout_s)

    @staticmethod
    async def _make(
        handle: EngineHandle,
    ) -> tuple[Incarnation, tuple[Incarnation, EngineStats] | CallFailed]:
        num_starts = 0
        while True:
            try:
                incarnation = await handle.actor.incarnation.remote()
                num_starts += 1
                factories = list(handle.factories.values())
                return incarnation, await handle.actor.make.remote(handle.factory, factories)
            except ActorUnavailableError:
                if num_starts == _MAX_STARTS:
                    raise
                # It is being restarted.
                await asyncio.sleep(_RETRY_S)

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int
    ) -> None:
        """Send weights as references; others than `WeightReferences` and `WeightHistory` are put into the store first.

        Engines of one node read the same copy, and an `HFEngine` on CPU uses it in place. An iterable that fails
        half-way leaves the engine with its old weights. If this is cancelled, the update may still happen.

        Raises:
            EngineDiedError: the engine has died, also by references that were lost after it had read a part of them.
        """
        self._check_open()
        if not isinstance(weights, WeightReferences | WeightHistory):
            weights = WeightReferences.put(weights)
        await self._call(Engine.update_weights, weights, version=version)

    async def close(self) -> None:
        """Abandon what this client generates. Idempotent; the actor and its engine stay: see `EngineHandle.end`."""
        if self._is_closed:
            return
        self._is_closed = True
        is_dead = self._death is not None
        self._end("it was closed")
        self._life.cancel()
        if not is_dead:
            with suppress(TimeoutError, RayActorError):
                await asyncio.wait_for(self._actor.leave.remote(self._client), END_TIMEOUT_S)

    def _send(self, call_id: int, message: Setup | EngineCall) -> None:
        call: Any = call_id, message
        # Ray itself must see references to weights.
        if not updates_weights(message):
            call = pickle.dumps(call, protocol=5)
        reply = self._actor.take.remote(
            self._incarnation.token, self._client, next(self._numbers), call
        )
        # If the actor is gone, the stream of its answers says so.
        reply.future().add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _is_controlled(self) -> bool:
        call = self._actor.is_controlled.options(concurrency_group=_NEWS).remote()
        with suppress(TimeoutError, RayError):
            return await asyncio.wait_for(call, END_TIMEOUT_S)
        return False

    def _end_silent(self, reason: str) -> None:
        self._end(f"it was {reason}, and killed")
        self._life.cancel()
        ray.kill(self._actor, no_restart=False)

    def _end(self, reason: str) -> None:
        self._watcher.cancel()
        if self._death is None:
            self._death = f"engine actor, {self._incarnation}, died: {reason}"
        self._fail_all()

    async def _receive(self) -> None:
        """Take the actor's messages until it is dead."""
        try:
            while True:
                stream = self._actor.stream.remote(
                    self._incarnation.token, self._client, self._heartbeat_timeout_s
                )
                async for packed in stream:
                    for message in pickle.loads(await packed):
                        if isinstance(message, CallFailed) and not message.call_id:
                            raise rebuild_exception(message, self.pid)
                        self._take(message)
        except RayError as error:
            self._end(_explain_end(error))
        except EngineDiedError as death:
            self._end(death.reason)


def _pickle_factory(factory: Factory) -> bytes:
    # Separately: a factory that cannot be unpickled there is then an error to be sent back, not an actor that cannot
    # start.
    return cloudpickle.dumps(factory)  # pyright: ignore[reportPrivateImportUsage]


def _explain_end(error: RayError) -> str:
    if isinstance(error, ActorUnavailableError):
        return "it was killed, crashed, or cannot be reached"
    last_line = str(error).strip().rpartition("\n")[2]
    if "ray.kill" in last_line:
        return "it was ended"
    return last_line
