"""A trainer group whose ranks are processes of this machine."""

import asyncio
import multiprocessing
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gcore_controller.errors import RankError
from gcore_controller.runtimes.inline_trainer import ComputingTrainerGroup
from gcore_controller.runtimes.local.rank_process import run_rank
from gcore_controller.trainer_group import (
    BatchT,
    Close,
    Computation,
    ExportWeights,
    Message,
    Replica,
    Score,
    TrainerSpec,
    Weights,
    deal,
)

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_DEATH_S = 0.5
"""How long a rank's error waits for news of another rank's death."""


class LocalTrainerGroup(ComputingTrainerGroup[BatchT]):
    """A `SharedTrainerGroup` on ranks that are started here, and ended by `close`.

    Args:
        spec: the ranks.
        cost_of: work of a micro-batch, in any unit, by which micro-batches are balanced.

    Raises:
        RankError: a rank could not start.
    """

    def __init__(self, spec: TrainerSpec, *, cost_of: Callable[[BatchT], float]) -> None:
        self._cost_of = cost_of
        self._folder = Path(tempfile.mkdtemp(prefix="gcore-ranks-"))
        # Forked from a clean server that has imported torch once: this process may hold an engine, threads and locks.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([run_rank.__module__, *spec.preload])
        self._turn = asyncio.Lock()
        self._processes: list[BaseProcess] = []
        self._connections: list[Any] = []
        for rank in range(spec.num_ranks):
            ours, theirs = context.Pipe()
            arguments = rank, spec, self._folder / "store", theirs
            process = context.Process(target=run_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._replicas: dict[str, list[Replica]] = {}
        for roles in self._collect():
            for role, replica in roles.items():
                self._replicas.setdefault(role, []).append(replica)

    @property
    def num_replicas(self) -> int:
        """See `TrainerClient.num_replicas`."""
        return self._replicas["actor"][0][1]

    def export_weights(self, *, averaged: bool = False) -> Weights:
        """See `TrainerWorker.export_weights`."""
        return _ReceivedWeights(partial(self._exported, averaged))

    def close(self) -> None:
        """See `TrainerGroup.close`; does nothing after the first time."""
        if not self._connections:
            return
        self._ask_all(Close())
        connections, self._connections = self._connections, []
        for process, connection in zip(self._processes, connections, strict=True):
            process.join()
            connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _compute(self, message: Computation) -> Any:
        batches = message.micro_batches
        replica_of = [replica for replica, _ in self._replicas[message.role]]
        parts = deal([self._cost_of(batch) for batch in batches], self._replicas[message.role][0][1])
        # All ranks of a replica get its micro-batches.
        messages = [replace(message, micro_batches=[batches[i] for i in parts[r]]) for r in replica_of]
        async with self._turn:
            of_ranks = await _to_its_end(self._ask, messages)
        answers = [of_ranks[replica_of.index(r)] for r in range(len(parts))]
        if not isinstance(message, Score):
            return answers[0]
        found = {i: outputs for r, part in enumerate(parts) for i, outputs in zip(part, answers[r], strict=True)}
        return [found[i] for i in range(len(batches))]

    def _ask_all(self, message: Message) -> Any:
        if not self._connections:
            raise RankError("the training ranks have ended")
        return self._ask([message] * len(self._connections))[0]

    def _ask(self, messages: Sequence[Message]) -> list[Any]:
        """Send each rank its message; return all answers, by rank."""
        self._send(messages)
        return self._collect()

    def _exported(self, averaged: bool, digests: dict[str, Any]) -> "Iterator[tuple[str, torch.Tensor]]":
        """Receive the weights from rank 0, and put its digests of them into ``digests``."""
        import torch

        self._send([ExportWeights(averaged=averaged)] * len(self._connections))
        while (header := self._receive(0)) is not None:
            name, dtype, shape, digests[name] = header
            data = torch.empty(shape, dtype=dtype)
            if data.numel():
                self._connections[0].recv_bytes_into(data.reshape(-1).view(torch.uint8).numpy())
            yield name, data
        self._collect()

    def _send(self, messages: Sequence[Message | ExportWeights]) -> None:
        for connection, message in zip(self._connections, messages, strict=True):
            with suppress(BrokenPipeError):  # `_collect` says which rank died, and how
                connection.send(message)

    def _collect(self) -> list[Any]:
        """Receive an answer from every rank, in whatever order they come."""
        answers: dict[int, Any] = {}
        while len(answers) < len(self._connections):
            waiting = [c for rank, c in enumerate(self._connections) if rank not in answers]
            for connection in wait(waiting):
                rank = self._connections.index(connection)
                answers[rank] = self._receive(rank)
        return [answers[rank] for rank in range(len(answers))]

    def _receive(self, rank: int) -> Any:
        try:
            error, value = self._connections[rank].recv()
        except (EOFError, OSError):
            self._processes[rank].join()
            raise self._death_of(rank) from None
        if error is not None:
            # A rank that misses another one may report it before it is known that the other one has died.
            if (dead := self._dead_rank()) is not None:
                raise self._death_of(dead) from error
            self._kill()
            raise error
        return value

    def _dead_rank(self) -> int | None:
        """Return a rank that has ended by a signal or with an error, or does so soon."""
        until_s = time.monotonic() + _DEATH_S
        while True:
            for rank, process in enumerate(self._processes):
                if process.exitcode:
                    return rank
            if time.monotonic() > until_s:
                return None
            time.sleep(0.02)

    def _death_of(self, rank: int) -> RankError:
        """End all other ranks, and return the error that says how this one has ended."""
        process = self._processes[rank]
        self._kill()
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return RankError(f"training rank {rank} (process {process.pid}) {how}")

    def _kill(self) -> None:
        """End all ranks: one that has failed leaves the others waiting in a collective."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._connections = []
        shutil.rmtree(self._folder, ignore_errors=True)


class _ReceivedWeights:
    """Weights from rank 0, with the digests that it made of them.

    Args:
        receive: yields the weights, and puts the digest of each into a dict.
    """

    def __init__(self, receive: "Callable[[dict[str, Any]], Iterator[tuple[str, torch.Tensor]]]") -> None:
        self._receive = receive
        self.digests: Mapping[str, Any] = {}

    def __iter__(self) -> "Iterator[tuple[str, torch.Tensor]]":
        digests: dict[str, Any] = {}
        self.digests = digests
        return self._receive(digests)


async def _to_its_end(call: Callable[..., T], *arguments: Any) -> T:
    """Make a call in a thread, and wait for its end even if the caller is cancelled: the ranks answer this call."""
    task = asyncio.create_task(asyncio.to_thread(call, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
