"""A trainer group whose ranks are processes of this machine, which answer messages from pipes."""

import asyncio
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from gcore_controller.errors import RankError
from gcore_controller.trainer_group import (
    BatchT,
    Close,
    Computation,
    ExportWeights,
    Message,
    MessageTrainerGroup,
    Replica,
    Score,
    TrainerSpec,
    TrainerWorker,
    TrainStep,
    Weights,
    answer,
    deal,
)

if TYPE_CHECKING:
    import torch

_DEATH_S = 0.5
"""How long a rank's error waits for news of another rank's death."""


def _run_rank(rank: int, spec: TrainerSpec, store: Path, connection: Connection) -> None:
    """Answer messages until the pipe is closed or `Close` arrives: with an error, or None, and a value.

    The first answer, to no message, holds the rank's replica in each role.
    """
    spec.enter_process(rank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the main process decides
    os.environ["OMP_NUM_THREADS"] = str(spec.num_threads)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(spec.num_threads)
    device = torch.device(spec.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    try:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=spec.num_ranks)
        worker = spec.make_worker(str(device))
        connection.send((None, {role: worker.replica(role) for role in worker.roles}))
        while True:
            message = connection.recv()
            if isinstance(message, ExportWeights):
                _export(worker, message, connection if rank == 0 else None)
                connection.send((None, None))
            else:
                connection.send((None, answer(worker, message)))
            if isinstance(message, Close):
                return
    except (EOFError, BrokenPipeError):  # the main process is gone
        return
    except Exception as error:
        if not isinstance(error, (RankError, *spec.expected_errors)):
            error = RankError(f"a training rank failed:\n{''.join(traceback.format_exception(error))}")
        with suppress(OSError):
            connection.send((error, None))
    finally:
        os._exit(0)  # process groups whose other ranks are gone would wait for them


def _export(worker: TrainerWorker[Any], message: ExportWeights, connection: Connection | None) -> None:
    """Send each tensor as a header (name, dtype, shape, digests) and its bytes, then None."""
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
    if connection is not None:
        connection.send((None, None))


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
        context.set_forkserver_preload([__name__, *spec.preload])
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
        self._replicas: dict[str, list[Replica]] = {}
        for roles in self._collect():
            for role, replica in roles.items():
                self._replicas.setdefault(role, []).append(replica)

    @property
    def num_replicas(self) -> int:
        return self._replicas["actor"][0][1]

    async def score(self, role: str, micro_batches: Sequence[BatchT]) -> list[list[Any]]:
        return await self._compute(Score(role=role, micro_batches=micro_batches))

    async def score_and_route(self, micro_batches: Sequence[BatchT]) -> list[list[tuple[Any, Any]]]:
        return await self._compute(Score(role="actor", micro_batches=micro_batches, with_routing=True))

    async def train_step(self, role: str, micro_batches: Sequence[BatchT]) -> dict[str, float]:
        return await self._compute(TrainStep(role=role, micro_batches=micro_batches))

    def export_weights(self, *, averaged: bool = False) -> Weights:
        return _ReceivedWeights(partial(self._exported, averaged))

    def close(self) -> None:
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
            asked = asyncio.create_task(asyncio.to_thread(self._ask, messages))
            try:
                of_ranks = await asyncio.shield(asked)
            except asyncio.CancelledError:
                # The next answers of the ranks are those to this call.
                await asyncio.wait([asked])
                raise
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


@dataclass
class _ReceivedWeights:
    """Weights from rank 0, with the digests that it made of them: ``receive`` puts these into a dict on the way."""

    receive: "Callable[[dict[str, Any]], Iterator[tuple[str, torch.Tensor]]]"
    digests: dict[str, Any] = field(default_factory=dict[str, Any])

    def __iter__(self) -> "Iterator[tuple[str, torch.Tensor]]":
        self.digests = {}
        return self.receive(self.digests)
