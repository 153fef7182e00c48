"""The side of a remote engine, in a process or a Ray actor: messages, the making of the engine, and its answers."""

import asyncio
import faulthandler
import gc
import inspect
import os
import pickle
import re
import signal
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from gcore_rollout.engines.protocol import AnyRequest, AnySample, Engine, EngineStats
from gcore_rollout.errors import EngineDiedError, EngineStartError, RolloutError
from gcore_rollout.weight_sync.digests import report_weights

if TYPE_CHECKING:
    import torch

BEAT_INTERVAL_S = 1.0
"""Time between two reports of an engine's stats that no client has asked for."""
_GATHER_S = 0.02
"""How long a report waits for further calls that it can cover."""
CONTROL_PATIENCE = 10.0
"""A remote engine may be silent this many times longer during a call other than `Engine.generate`: an update blocks its
event loop for minutes if the model is large."""
_MEMORY_WAIT_S = 60.0
"""How long an engine whose memory is short is tried again: loading it again and again may take much longer."""
_NO_MEMORY = re.compile(
    r"out of memory|OutOfMemory|MemoryError|(free|available) memory|WorkerProc init", re.IGNORECASE
)
"""In errors of torch and vLLM; the last one of vLLM's ranks, which have the cause in their logs alone."""

AnyEngine = Engine[AnyRequest, AnySample]


@dataclass(frozen=True)
class Setup:
    """The first message to a new process: its environment, and the factory of its engine or reward."""

    environment: dict[str, str]
    import_path: list[str]
    folder: str
    num_threads: int | None
    beat_interval_s: float
    factory: bytes
    """Pickled separately: a module that cannot be imported there is then an error to be sent back, not a broken
    message."""

    @classmethod
    def here(
        cls,
        factory: bytes,
        *,
        env: Mapping[str, str] | None = None,
        num_threads: int | None = None,
        beat_interval_s: float = 0.0,
    ) -> Self:
        """Return the setup of a process with the environment, folder and import path of this one."""
        return cls(
            environment=dict(os.environ) | dict(env or {}),
            import_path=list(sys.path),
            folder=str(Path.cwd()),
            num_threads=num_threads,
            beat_interval_s=beat_interval_s,
            factory=factory,
        )

    def enter(self) -> None:
        """Give this process the environment, folder and import path."""
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.path[:] = self.import_path


@dataclass(frozen=True)
class RemoteCall:
    method: Callable[..., Any]
    """A method of `Engine`, or `report_weights`. The samples of `Engine.generate` come before the answer. The weights
    of `Engine.update_weights` are the `SharedWeights.layout` of memory that was sent over the socket for descriptors,
    or the handles of a `SharedCudaWeights`; in Ray the references."""
    arguments: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Done:
    """A call has returned; with the id 0, nothing but the stats is new."""

    call_id: int
    stats: EngineStats
    value: Any = None


@dataclass(frozen=True)
class CallFailed:
    """A call has failed; with the id 0, the engine has ended for this client."""

    call_id: int
    error: bytes
    """Pickled type, arguments and attributes; empty if they cannot be."""
    description: str
    traceback: str


EngineCall = RemoteCall | None
"""None: the rest of an `Engine.generate` is not wanted any more, or, with the id 0, the stats are to be reported; there
is no answer."""
Finished = list[tuple[int, AnySample]]
"""Samples that finish together, each with the id of its call: one message, in which what they share is sent once."""
FromEngine = Finished | Done | CallFailed


def updates_weights(message: object) -> bool:
    """Return whether a message is a call of `Engine.update_weights`."""
    return isinstance(message, RemoteCall) and message.method is Engine.update_weights


def make_failure(call_id: int, error: Exception) -> CallFailed:
    """Return an exception as a message, without its arguments if they cannot be pickled."""
    try:
        packed = pickle.dumps((type(error), error.args, vars(error)), protocol=5)
    except Exception:
        packed = b""
    description = f"{type(error).__name__}: {error}"
    return CallFailed(call_id, packed, description, "".join(traceback.format_exception(error)))


def rebuild_exception(failed: CallFailed, pid: int) -> Exception:
    """Return the exception of a message, of the same type if that can be imported here."""
    error: Exception
    try:
        error_type, arguments, attributes = pickle.loads(failed.error)
        # Not error_type(*arguments): the arguments of a constructor need not be those of the exception.
        error = error_type.__new__(error_type, *arguments)
        vars(error).update(attributes)
    except Exception:
        error = RolloutError(failed.description)
    error.add_note(f"raised in process {pid}:\n{failed.traceback}")
    return error


async def make_engine(factory: bytes, num_threads: int | None) -> AnyEngine:
    """Make an engine by a pickled function, which may be asynchronous, with so many threads of torch on CPU.

    If its memory is short, wait for it, because that of an engine which has died is freed a while later.

    Raises:
        EngineStartError: it was short for a minute.
        Exception: what the function raised.
    """
    if num_threads is not None:
        import torch

        torch.set_num_threads(num_threads)
    end_s: float | None = None
    wait_s = 1.0
    while True:
        try:
            engine = pickle.loads(factory)()
            if inspect.isawaitable(engine):
                return await engine
            return engine
        except Exception as error:
            if not _NO_MEMORY.search(repr(error)):
                raise
            shortage = repr(error)
        end_s = end_s or time.monotonic() + _MEMORY_WAIT_S
        if time.monotonic() + wait_s > end_s:
            raise EngineStartError(
                f"memory was short for {_MEMORY_WAIT_S:g} s: {shortage}; expected that what ran on the engine's device "
                "before, or else runs there, leaves enough"
            )
        # Now that the error is gone, which held what was loaded.
        gc.collect()
        await asyncio.sleep(wait_s)
        wait_s *= 2


class EngineSession:
    """Answers the messages of one client, each in a task of its own.

    ``read`` is called in the order of messages with the weights of each update, and its result awaited in the task.
    """

    def __init__(
        self,
        send: Callable[[FromEngine], None],
        read: Callable[[Any], "Awaitable[Iterable[tuple[str, torch.Tensor]]]"],
    ) -> None:
        # The stacks of all threads, for a client to which the process is silent.
        faulthandler.register(signal.SIGUSR1, file=2, chain=False)
        self.engine: Any = None
        """None until it is made."""
        self._send = send
        self._read = read
        self._finished: Finished = []
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self.controls: set[int] = set()
        """Ids of the calls in progress other than `Engine.generate`."""
        self._must_report = asyncio.Event()
        self._is_idle = True
        """Whether nothing was running at the last report."""

    def take(self, call_id: int, message: EngineCall) -> None:
        if self._is_idle or not call_id:
            self._must_report.set()
        match message:
            case RemoteCall(method, (source,), options) if method is Engine.update_weights:
                self.start(call_id, self._update(self._read(source), options["version"]))
            case RemoteCall(method, arguments) if method is Engine.generate:
                self.start(call_id, self._generate(call_id, *arguments))
                self.controls.discard(call_id)
            case RemoteCall():
                self.start(call_id, self._call(message))
            case None:
                task = self._tasks.get(call_id)
                if call_id and task is not None:
                    task.cancel()

    def start(self, call_id: int, work: Coroutine[Any, Any, Any]) -> None:
        """Start work whose result or exception is the answer to a call."""
        task = asyncio.create_task(self._answer(call_id, work))
        self._tasks[call_id] = task
        self.controls.add(call_id)
        task.add_done_callback(lambda _: self._tasks.pop(call_id))
        task.add_done_callback(lambda _: self.controls.discard(call_id))

    def abandon(self) -> "dict[int, asyncio.Task[None]]":
        """Cancel all calls without an answer; return the tasks by id."""
        tasks = dict(self._tasks)
        for task in tasks.values():
            task.cancel()
        return tasks

    async def beat(self, interval_s: float) -> None:
        """Report stats at intervals, and soon after they are asked for or an idle engine is called."""
        while self.engine is not None:
            self._must_report.clear()
            stats = self.engine.stats()
            self._is_idle = not stats.num_running
            self._send(Done(0, stats))
            # Not wait_for, which on Python 3.11 may swallow a cancellation.
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._must_report.wait()
                await asyncio.sleep(_GATHER_S)

    async def _answer(self, call_id: int, work: Coroutine[Any, Any, Any]) -> None:
        try:
            value = await work
        except Exception as error:
            self._send(make_failure(call_id, error))
            if isinstance(error, EngineDiedError):
                self.engine_died(error)
        else:
            self._send(Done(call_id, self.engine.stats(), value))

    def engine_died(self, error: EngineDiedError) -> None:
        """Do nothing: the client ends this process."""

    async def _generate(self, call_id: int, requests: tuple[AnyRequest, ...]) -> None:
        samples = self.engine.generate(requests)
        try:
            async for sample in samples:
                if not self._finished:
                    asyncio.get_running_loop().call_soon(self._send_finished)
                self._finished.append((call_id, sample))
        finally:
            # Before what ends the call.
            self._send_finished()
            if hasattr(samples, "aclose"):
                await samples.aclose()

    def _send_finished(self) -> None:
        finished = self._finished
        self._finished = []
        try:
            if finished:
                self._send(finished)
        except Exception as error:
            # One of them cannot be pickled.
            for call_id in {call_id for call_id, _ in finished}:
                self._send(make_failure(call_id, error))

    async def _update(
        self, reading: "Awaitable[Iterable[tuple[str, torch.Tensor]]]", version: int
    ) -> bool:
        """Return whether the engine uses the memory of the weights from now on."""
        weights: Any = await reading
        release = getattr(weights, "release", None)
        if release is not None:
            # The sender's own memory, which it needs again.
            try:
                await self.engine.update_weights(weights, version=version)
            finally:
                release()
            return False
        update_in_place = getattr(self.engine, "update_weights_in_place", None)
        if update_in_place is not None:
            return await update_in_place(weights, version=version)
        await self.engine.update_weights(weights, version=version)
        return False

    async def _call(self, call: RemoteCall) -> Any:
        if call.method is report_weights:
            return await report_weights(self.engine, *call.arguments)
        return await getattr(self.engine, call.method.__name__)(*call.arguments, **call.options)
