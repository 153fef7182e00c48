"""A trainer group whose ranks are processes of this machine, which answer messages from pipes."""

import asyncio
import multiprocessing
import os
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from gcore_controller.errors import RankError
from gcore_controller.trainer_group import (
    BatchT,
    Computation,
    Message,
    MessageTrainerGroup,
    Score,
    TrainerSpec,
    TrainerWorker,
    TrainStep,
    Weights,
    close,
    deal_message,
    join_ranks,
    rank_failure,
)

if TYPE_CHECKING:
    import torch

_DEATH_S = 0.5
"""How long a rank's error waits for news of another rank's death."""


_CUDA_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With 1, ``torch.cuda.is_available()``, which modules call at import, asks the driver's management library.

Otherwise it asks the CUDA runtime, after which no fork of the process can use CUDA.
"""


@dataclass(frozen=True)
class _ExportWeights:
    """The message to gather the policy's weights on all ranks; rank 0 sends them, one by one."""

    averaged: bool


def _start_fork_server(preload: list[str]) -> None:
    """Start the server from which ranks are forked, unless it runs: its imports must not initialise CUDA."""
    before = os.environ.get(_CUDA_CHECK)
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    os.environ[_CUDA_CHECK] = "1"  # the server's, and so its children's
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ[_CUDA_CHECK]
        else:
            os.environ[_CUDA_CHECK] = before


def _run_rank(rank: int, spec: TrainerSpec, store: Path, connection: Connection) -> None:
    """Answer messages until the pipe is closed: with an error, or None, and a value.

    The first answer, to no message, holds the rank's replica in each role.
    """
    spec.enter_process(rank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the main process decides
    os.environ["OMP_NUM_THREADS"] = str(spec.num_threads)
    import torch
    from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage] - documented, not in __all__

    device = spec.device
    if device.startswith("cuda"):
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    try:
        worker, replicas = join_ranks(spec, rank, FileStore(str(store), spec.num_ranks), device)
        connection.send((None, replicas))
        while True:
            message = connection.recv()
            if isinstance(message, _ExportWeights):
                answer = _export(worker, message, connection if rank == 0 else None)
            else:
                answer = message(worker)
            connection.send((None, answer))
    except (EOFError, BrokenPipeError):  # the group was closed, or the main process is gone
        return
    except Exception as error:
        message = f"training rank {rank} failed:\n{''.join(traceback.format_exception(error))}"
        error = rank_failure(error, message, spec.expected_errors)
        with suppress(OSError, EOFError):
            connection.send((error, None))
            connection.recv()  # until it is ended
    finally:
        os._exit(0)  # process groups whose other ranks are gone would wait for them


def _export(worker: TrainerWorker[Any], message: _ExportWeights, connection: Connection | None) -> None:
    """Send each tensor as a header (name, dtype, shape, digests) and its bytes."""
    import torch

    weights = worker.export_weights(averaged=message.averaged)
    digests = getattr(weights, "digests", {})
    for name, tensor in weights:
        if connection is None:
            continue
        data = tensor.detach().cpu().contiguous()
        connection.send((None, (name, data.dtype, tuple(data.shape), digests.get(name))))
        if data.numel():
            connection.send_bytes(data.reshape(-1).view(torch.uint8).numpy().data)


class LocalTrainerGroup(MessageTrainerGroup, Generic[BatchT]):
    """A `SharedTrainerGroup` on ranks that are started here, and ended by `close`.

    Args:
        cost_of: work of a micro-batch, in any unit, by which micro-batches are balanced.

    Raises:
        RankError: a rank could not start.
    """

    def __init__(self, spec: TrainerSpec, *, cost_of: Callable[[BatchT], float]) -> None:
        self._cost_of = cost_of
        self._folder = Path(tempfile.mkdtemp(prefix="gcore-ranks-"))
        # Forked from a clean server that has imported torch once: this process may hold an engine, threads and locks.
        context = multiprocessing.get_context("forkserver")
        _start_fork_server([__name__, *spec.preload])
        self._turn = asyncio.Lock()
        self._processes: list[BaseProcess] = []
        self._connections: list[Any] = []
        for rank in range(spec.num_ranks):
            ours, theirs = context.Pipe()
            arguments = rank, spec, self._folder / "store", theirs
            process = context.Process(target=_run_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        found = self._collect()
        self._replicas = {role: [replicas[role] for replicas in found] for role in found[0]}

    @property
    def num_replicas(self) -> int:
        return self._replicas["actor"][0][1]

    async def score(self, role: str, micro_batches: Sequence[BatchT], *, with_routing: bool = False) -> list[list[Any]]:
        message = Score(role=role, micro_batches=micro_batches, with_routing=with_routing)
        parts, answers = await self._compute(message)
        found: dict[int, list[Any]] = {}
        for part, outputs in zip(parts, answers, strict=True):
            found |= zip(part, outputs, strict=True)
        return [found[i] for i in range(len(micro_batches))]

    async def train_step(self, role: str, micro_batches: Sequence[BatchT]) -> dict[str, float]:
        _, answers = await self._compute(TrainStep(role=role, micro_batches=micro_batches))
        return answers[0]

    def export_weights(self, *, averaged: bool = False) -> Weights:
        return _ReceivedWeights(partial(self._exported, averaged))

    def close(self) -> None:
        if self._connections:
            self._ask_all(close)
            self._end()

    async def _compute(self, message: Computation) -> tuple[list[list[int]], list[Any]]:
        """Return the indices of each replica's micro-batches, and each replica's answer."""
        replicas = self._replicas[message.role]
        parts, messages = deal_message(message, [self._cost_of(batch) for batch in message.micro_batches], replicas)
        async with self._turn:
            asked = asyncio.create_task(asyncio.to_thread(self._ask, messages))
            try:
                of_ranks = await asyncio.shield(asked)
            except asyncio.CancelledError:
                # The next answers of the ranks are those to this call.
                await asyncio.wait([asked])
                raise
        of_replica = dict(zip((replica for replica, _ in reversed(replicas)), reversed(of_ranks), strict=True))
        return parts, [of_replica[replica] for replica in range(len(parts))]

    def _ask_all(self, message: Message) -> Any:
        if not self._connections:
            raise RankError("the training ranks have ended")
        return self._ask([message] * len(self._connections))[0]

    def _ask(self, messages: Sequence[Message | _ExportWeights]) -> list[Any]:
        self._send(messages)
        return self._collect()

    def _exported(self, averaged: bool, digests: dict[str, Any]) -> "Iterator[tuple[str, torch.Tensor]]":
        """Receive the weights from rank 0, and put its digests of them into ``digests``."""
        import torch

        self._send([_ExportWeights(averaged)] * len(self._connections))
        while (header := self._receive(0)) is not None:
            name, dtype, shape, digests[name] = header
            data = torch.empty(shape, dtype=dtype)
            if data.numel():
                self._connections[0].recv_bytes_into(data.reshape(-1).view(torch.uint8).numpy())
            yield name, data
        self._collect(first=1)

    def _send(self, messages: Sequence[Message | _ExportWeights]) -> None:
        for connection, message in zip(self._connections, messages, strict=True):
            with suppress(BrokenPipeError):  # `_collect` says which rank died, and how
                connection.send(message)

    def _collect(self, *, first: int = 0) -> list[Any]:
        """Receive an answer from every rank, or all but the first ones, in whatever order they come."""
        answers: dict[int, Any] = {}
        while waiting := [rank for rank in range(first, len(self._connections)) if rank not in answers]:
            for connection in wait([self._connections[rank] for rank in waiting]):
                rank = self._connections.index(connection)
                answers[rank] = self._receive(rank)
        return [answers[rank] for rank in sorted(answers)]

    def _receive(self, rank: int) -> Any:
        """Return a rank's next answer; if there is none, end all ranks: others may wait for it in a collective."""
        error: Exception | None = None
        try:
            error, value = self._connections[rank].recv()
            if error is None:
                return value
        except (EOFError, OSError):
            self._processes[rank].join()
        # A rank that misses another one may report it before it is known that the other one has died.
        wait([process.sentinel for process in self._processes], timeout=_DEATH_S)
        codes = [process.exitcode for process in self._processes]
        self._end(kill=True)
        for dead, (process, code) in enumerate(zip(self._processes, codes, strict=True)):
            if code is not None:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                raise RankError(f"training rank {dead} (process {process.pid}) {how}") from error
        assert error is not None
        raise error

    def _end(self, *, kill: bool = False) -> None:
        """End all ranks: at once, or as they see that their pipes are closed."""
        connections, self._connections = self._connections, []
        for connection, process in zip(connections, self._processes, strict=True):
            connection.close()
            if kill:
                process.kill()
        for process in self._processes:
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass
class _ReceivedWeights:
    """Weights from rank 0, with the digests that it made of them: ``receive`` puts these into a dict on the way."""

    receive: "Callable[[dict[str, Any]], Iterator[tuple[str, torch.Tensor]]]"
    digests: dict[str, Any] = field(default_factory=dict[str, Any])

    def __iter__(self) -> "Iterator[tuple[str, torch.Tensor]]":
        self.digests = {}
        return self.receive(self.digests)
