"""Client of an engine in an actor of a Ray cluster, with weights passed by reference."""

import asyncio
import pickle
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Self, TypeVar, cast
from uuid import uuid4

import torch

from gcore_rollout.engines.processes.wire import Failed, RemoteEngine, exception
from gcore_rollout.engines.protocol import AnySample, Engine, EngineStats, RequestT, SampleT
from gcore_rollout.engines.ray.engine_actor import ClientCall, EngineActor, EngineReply, Incarnation, pack
from gcore_rollout.errors import EngineDiedError, EngineStartError, MissingExtraError, RolloutError
from gcore_rollout.weight_sync.weight_references import WeightReferences

# Not before `weight_references`, which sets Ray's environment.
try:
    import ray
    from ray import cloudpickle
    from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayError
except ImportError as error:
    raise MissingExtraError("ray", "ray") from error

T = TypeVar("T")

_MAX_CONCURRENCY = 100_000
_MAX_STARTS = 3
_RETRY_S = 0.1
_END_TIMEOUT_S = 10.0
_END_POLL_S = 0.02


Factory = Callable[[], Engine[Any, Any] | Awaitable[Engine[Any, Any]]]


@dataclass(frozen=True)
class EngineHandle:
    """An actor of a Ray cluster and the factory of its engine; can be passed to other processes of the cluster."""

    actor: Any
    factory: bytes
    """Makes the engine there; pickled by value."""

    def becoming(self, factory: Factory) -> "EngineHandle":
        """Return a handle of the same actor with another engine, to change its role without a new process.

        The first client that connects by the result ends the current engine, which is then dead for its clients. They,
        too, must connect by the new handle from then on.
        """
        return replace(self, factory=_packed(factory))


def start_engine_actor(
    factory: Factory,
    *,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
    resources: Mapping[str, float] | None = None,
    num_threads: int | None = None,
    name: str | None = None,
    scheduling_strategy: Any = None,
) -> EngineHandle:
    """Start an actor for an engine, which is made by the first `RayEngine.connect`.

    It ends with the process that calls this, or by `end_engine_actor`. After any other end Ray restarts it, with a new
    engine of the same factory, for clients that connect again.

    Args:
        factory: makes the engine there; a function that Ray can pickle, such as ``partial(HFEngine.from_pretrained,
            path)``.
        num_cpus: CPUs that it reserves, like `num_gpus` and `resources`, which have Ray's names.
        num_threads: of torch on CPU; default: what Ray gives it.
        scheduling_strategy: see `ray.remote`.
        name: for `ray.get_actor`.
    """
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}; expected at least 1")
    make: Any = ray.remote(EngineActor)
    options = {
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "resources": dict(resources or {}),
        "name": name,
        "scheduling_strategy": scheduling_strategy,
        "max_restarts": -1,
        "max_concurrency": _MAX_CONCURRENCY,
    }
    return EngineHandle(make.options(**options).remote(num_threads), _packed(factory))


async def end_engine_actor(handle: EngineHandle) -> None:
    """Close an actor's engine and end the actor for good, even while it generates. Idempotent."""
    actor = handle.actor
    try:
        with suppress(TimeoutError, RayActorError):
            await asyncio.wait_for(_answer_of(actor.close.remote()), _END_TIMEOUT_S)
    finally:
        ray.kill(actor)
    # Until it is dead, it answers.
    with suppress(TimeoutError, RayActorError):
        async with asyncio.timeout(_END_TIMEOUT_S):
            while True:
                await _answer_of(actor.incarnation.remote())
                await asyncio.sleep(_END_POLL_S)


class RayEngine(RemoteEngine[RequestT, SampleT]):
    """A client of an engine that a Ray actor runs; made by `connect`. See `RemoteEngine`.

    Several clients may share an actor. Each gets its own samples; `pause`, `update_weights` and `abort` act on those of
    all clients. The unfinished samples of a client that closed, or whose process died, are abandoned.

    A client of an actor that died stays dead, even if Ray has restarted the actor: `connect` again, to an engine with
    the weights that its factory gave it. The client is bound to the event loop in which it was connected.

    Attributes:
        handle: The handle of the actor.
    """

    _HOW_TO_OPEN = "connect again"

    def __init__(self, handle: EngineHandle, reply: EngineReply, *, heartbeat_timeout_s: float) -> None:
        super().__init__()
        self.handle = handle
        self._actor = handle.actor
        self._incarnation: Incarnation = reply.value
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._client = uuid4().hex
        self._numbers = count()
        self._last_reply = reply
        # Done once no reply of Ray is awaited any more.
        self._given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live())

    @classmethod
    async def connect(
        cls, handle: EngineHandle, *, start_timeout_s: float = 600.0, heartbeat_timeout_s: float = 120.0
    ) -> Self:
        """Wait until an actor's engine is made, and return a client of it.

        Args:
            handle: from `start_engine_actor`.
            heartbeat_timeout_s: how long the actor may be silent; it waits five times as long for this client.

        Raises:
            EngineStartError: it was not ready in time.
            EngineDiedError: the actor was ended, or its process died repeatedly before the engine was made.
            Exception: what the factory raised.
        """
        if heartbeat_timeout_s <= 0:
            raise ValueError(f"heartbeat_timeout_s is {heartbeat_timeout_s}; expected more than 0")
        try:
            async with asyncio.timeout(start_timeout_s):
                incarnation, reply = await cls._make(handle)
        except TimeoutError as error:
            raise EngineStartError(
                f"the engine actor was not ready after {start_timeout_s} s: free are {ray.available_resources()}"
            ) from error
        except RayActorError as error:
            raise EngineDiedError(f"the engine actor died before it was ready: {_reason(error)}") from error
        _raise_failure(reply.value, incarnation)
        return cls(handle, reply, heartbeat_timeout_s=heartbeat_timeout_s)

    @staticmethod
    async def _make(handle: EngineHandle) -> tuple[Incarnation, EngineReply]:
        num_starts = 0
        while True:
            try:
                incarnation = await _answer_of(handle.actor.incarnation.remote())
            except ActorUnavailableError:
                # It is being restarted.
                await asyncio.sleep(_RETRY_S)
                continue
            num_starts += 1
            try:
                return incarnation, await _answer_of(handle.actor.make.remote(handle.factory))
            except ActorUnavailableError:
                if num_starts == _MAX_STARTS:
                    raise

    def stats(self) -> EngineStats:
        assert self._last_reply.stats is not None
        return self._last_reply.stats

    async def generate(self, requests: Sequence[RequestT]) -> AsyncGenerator[SampleT]:
        unfinished = {(r.request_id, i): None for r in requests for i in r.sample_indices}
        call = ClientCall(self._client, next(self._numbers))
        is_running = False
        try:
            self._check_open()
            stream = self._actor.generate.remote(self._incarnation.token, call, pack(requests))
            is_running = True
            while is_running:
                for item in pickle.loads(await self._ask(_next_of(stream))):
                    is_running = isinstance(item, AnySample)
                    _raise_failure(item, self._incarnation)
                    if isinstance(item, AnySample):
                        unfinished.pop((item.request_id, item.index), None)
                        yield cast(SampleT, item)
            if unfinished:
                raise EngineDiedError("the engine actor abandoned the samples: this client was silent for too long")
        except EngineDiedError as death:
            raise EngineDiedError(death.reason, unfinished=tuple(unfinished)) from death
        finally:
            if is_running and not self._closed and self._death is None:
                self._actor.abandon.remote(call)

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Send weights as references; other weights than `WeightReferences` are put into the object store first.

        Engines of one node read the same copy, and an `HFEngine` on CPU uses it in place. An iterable that fails
        half-way leaves the engine with its old weights. If this is cancelled, the update may still happen.
        """
        self._check_open()
        references = weights if isinstance(weights, WeightReferences) else WeightReferences.put(weights)
        update = self._actor.update_weights.remote(self._incarnation.token, references, version)
        await self._ask(_answer_of(update))

    async def close(self) -> None:
        """Abandon what this client generates. Idempotent; the actor and its engine stay: see `end_engine_actor`."""
        if self._closed:
            return
        self._closed = True
        self._life.cancel()
        # Before the actor abandons the calls: their callers must learn of the close.
        self._stop_waiting()
        if self._death is None:
            with suppress(TimeoutError, RayActorError):
                await asyncio.wait_for(_answer_of(self._actor.leave.remote(self._client)), _END_TIMEOUT_S)

    async def _call(self, method: str, *arguments: Any) -> Any:
        self._check_open()
        return await self._ask(_answer_of(self._actor.call.remote(self._incarnation.token, method, *arguments)))

    async def _ask(self, answer: Awaitable[EngineReply]) -> Any:
        asking = asyncio.ensure_future(answer)
        # Retrieve the exception here, in case the waiting caller is cancelled.
        asking.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([asking, self._given_up], return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            asking.cancel()
            if self._closed:
                raise RolloutError("the engine was closed while generating")
            raise EngineDiedError(self._death or "")
        try:
            return self._take(asking.result())
        except (RayActorError, ObjectLostError) as error:
            self._die(_reason(error))
            raise EngineDiedError(self._death or "") from error

    def _take(self, reply: EngineReply) -> Any:
        if reply.number > self._last_reply.number and reply.stats is not None:
            self._last_reply = reply
        _raise_failure(reply.value, self._incarnation)
        return reply.value

    def _die(self, reason: str) -> None:
        if self._death is None:
            self._death = f"engine actor, {self._incarnation}, died: {reason}"

    async def _live(self) -> None:
        """Watch the actor until it is dead."""
        try:
            while True:
                stream = self._actor.watch.remote(self._incarnation.token, self._client, self._heartbeat_timeout_s)
                try:
                    while True:
                        self._take(await self._in_time(_next_of(stream)))
                except StopAsyncIteration:
                    pass
        except TimeoutError:
            self._die(f"it was silent for {self._heartbeat_timeout_s} s, and killed")
            ray.kill(self._actor, no_restart=False)
        except RayError as error:
            self._die(_reason(error))
        except EngineDiedError as death:
            self._die(death.reason)
        # Ray fails the calls in flight, each after the items that had arrived, unless a node is lost.
        await asyncio.sleep(_END_TIMEOUT_S)
        self._stop_waiting()

    async def _in_time(self, answer: Awaitable[T]) -> T:
        waiting = asyncio.ensure_future(answer)
        interval_s = self._heartbeat_timeout_s / 4
        silent_s = 0.0
        try:
            # Not by the clock: after a pause of this event loop, messages that came meanwhile are read before the next
            # turn.
            while not waiting.done():
                if silent_s >= self._heartbeat_timeout_s:
                    raise TimeoutError
                await asyncio.wait([waiting], timeout=interval_s)
                silent_s += interval_s
            return waiting.result()
        finally:
            waiting.cancel()

    def _stop_waiting(self) -> None:
        if not self._given_up.done():
            self._given_up.set_result(None)


def _packed(factory: Factory) -> bytes:
    # Separately: a factory that cannot be unpickled there is then an error to be sent back, not an actor that cannot
    # start.
    return cloudpickle.dumps(factory)  # pyright: ignore[reportPrivateImportUsage]


async def _answer_of(reference: Any) -> Any:
    return await reference


async def _next_of(stream: Any) -> Any:
    return await (await anext(stream))


def _raise_failure(value: Any, incarnation: Incarnation) -> None:
    if isinstance(value, Failed):
        raise exception(value, incarnation.pid)


def _reason(error: RayError) -> str:
    if isinstance(error, ActorUnavailableError):
        return "it was killed, crashed, or cannot be reached"
    last_line = str(error).strip().rpartition("\n")[2]
    return "it was ended" if "ray.kill" in last_line else last_line
