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
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from gcore_controller.errors import RankError
from gcore_controller.hangs import DUMP_S, describe_end, inspect_process, is_stopped, limit_s
from gcore_controller.trainer_group import (
    BatchT,
    Joined,
    Message,
    Replica,
    SharedTrainerGroup,
    TrainerSpec,
    TrainerWorker,
    Weights,
    deal,
    join_ranks,
    rank_failure,
)

if TYPE_CHECKING:
    import torch

_DEATH_S = 0.5
"""How long a rank's error waits for news of another rank's death."""
_POLL_EVERY_S = 1.0
"""Time between two looks at the ranks."""

_CUDA_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With 1, ``torch.cuda.is_available()``, which modules call at import, asks the driver's management library.

Otherwise it asks the CUDA runtime, after which no fork of the process can use CUDA.
"""


def _write_part(
    write: Callable[[Weights, Path], Any], path: Path, averaged: bool, worker: TrainerWorker[Any]
) -> tuple[Any, dict[str, Any]]:
    """Write a rank's part of the policy's weights to a file; return the layout, and digests."""
    weights = worker.export_weights(averaged=averaged)
    layout = write(weights, path)
    return layout, dict(getattr(weights, "digests", {}))


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

    The first answer, to no message, is what `join_ranks` returns of the rank.
    """
    spec.enter_process(rank)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole process group; the main process decides
    os.environ["OMP_NUM_THREADS"] = str(max(1, spec.num_threads // spec.num_ranks))
    # Gloo asks for no password: its ports are for this machine alone, whatever address the host's name stands for.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage] - documented, not in __all__

    device = spec.device
    if device.startswith("cuda"):
        device = f"cuda:{rank % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    try:
        meeting = FileStore(str(store), spec.num_ranks)
        worker, joined = join_ranks(spec, rank, meeting, device, num_here=spec.num_ranks)
        connection.send((None, joined))
        while True:
            message = connection.recv()
            connection.send((None, message(worker)))
    except (EOFError, BrokenPipeError):  # the group was closed, or the main process is gone
        return
    except Exception as error:
        message = f"training rank {rank} failed:\n{''.join(traceback.format_exception(error))}"
        error = rank_failure(error, rank, message, spec.expected_errors)
        with suppress(OSError, EOFError):
            connection.send((error, None))
            connection.recv()  # until it is ended
    finally:
        os._exit(0)  # process groups whose other ranks are gone would wait for them


class LocalTrainerGroup(SharedTrainerGroup[BatchT]):
    """A trainer group on ranks that are started here, and ended by `close`.

    Args:
        cost_of: work of a micro-batch, in any unit, by which micro-batches are balanced.

    Raises:
        RankError: a rank could not start.

    Example:
        >>> async def train(spec: TrainerSpec, micro_batches: list[list[float]]) -> dict[str, float]:
        ...     group = LocalTrainerGroup(spec, cost_of=len)
        ...     try:
        ...         return await group.train_step("actor", micro_batches)
        ...     finally:
        ...         group.close()
    """

    def __init__(self, spec: TrainerSpec, *, cost_of: Callable[[BatchT], float]) -> None:
        self._cost_of = cost_of
        self._write = spec.write_weights
        self._open_memory = spec.open_memory
        self._folder = Path(tempfile.mkdtemp(prefix="gcore-ranks-"))
        # Forked from a clean server that has imported torch once: this process may hold an engine, threads and locks.
        context = multiprocessing.get_context("forkserver")
        _start_fork_server([__name__, *spec.preload])
        self._turn = asyncio.Lock()
        self._processes: list[BaseProcess] = []
        self._connections: list[Any] = []
        self._heartbeat_timeout_s = spec.heartbeat_timeout_s
        self._longest_s: dict[str, float] = {}
        """Seconds of the longest call of each stage."""
        self._logs = [""] * spec.num_ranks
        """The file that the standard error of each rank goes to, once it has joined."""
        self._is_asking = False
        """Whether answers of the ranks are due, also after an interrupt."""
        self._how_it_ended = "the training ranks have ended"
        for rank in range(spec.num_ranks):
            ours, theirs = context.Pipe()
            arguments = rank, spec, self._folder / "store", theirs
            process = context.Process(target=_run_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        try:
            joined: list[Joined] = self._collect("start")
        except KeyboardInterrupt:
            self._end(kill=True)
            raise
        self._logs = [log for _, log in joined]
        self._replicas: dict[str, list[Replica]] = {}
        for role in joined[0][0]:
            self._replicas[role] = [replicas[role] for replicas, _ in joined]

    @property
    def num_replicas(self) -> int:
        return self._replicas["actor"][0][1]

    async def score(
        self, role: str, micro_batches: Sequence[BatchT], *, with_routing: bool = False
    ) -> list[list[Any]]:
        parts, answers = await self._compute(
            "score", role, micro_batches, with_routing=with_routing
        )
        outputs_by_index: dict[int, list[Any]] = {}
        for part, outputs in zip(parts, answers, strict=True):
            outputs_by_index |= zip(part, outputs, strict=True)
        return [outputs_by_index[i] for i in range(len(micro_batches))]

    async def train_step(self, role: str, micro_batches: Sequence[BatchT]) -> dict[str, float]:
        _, answers = await self._compute("train_step", role, micro_batches)
        return answers[0]

    def export_weights(self, *, averaged: bool = False) -> Weights:
        assert self._open_memory is not None, (
            "open_memory is None; expected a function for local ranks"
        )
        return _RankWeights(partial(self._write_weights, averaged), self._open_memory)

    def close(self) -> None:
        if self._is_asking:
            # An interrupt cut a call short, and a rank may be stopped.
            self._end(kill=True)
        if self._connections:
            self._ask_all("close", methodcaller("close"))
            self._end()

    async def _compute(
        self, method: str, role: str, micro_batches: Sequence[BatchT], **options: Any
    ) -> tuple[list[list[int]], list[Any]]:
        """Return the indices of each replica's micro-batches, and each replica's answer to a method of the worker."""
        replicas = self._replicas[role]
        parts = deal([self._cost_of(batch) for batch in micro_batches], replicas[0][1])
        messages: list[Message] = []
        for replica, _ in replicas:
            part = [micro_batches[i] for i in parts[replica]]
            messages.append(methodcaller(method, role, part, **options))
        async with self._turn:
            asking = asyncio.create_task(asyncio.to_thread(self._ask, method, messages))
            try:
                of_ranks = await asyncio.shield(asking)
            except asyncio.CancelledError:
                # The next answers of the ranks are those to this call.
                await asyncio.wait([asking])
                raise
        of_replica: dict[int, Any] = {}
        for (replica, _), answer in zip(replicas, of_ranks, strict=True):
            # All ranks of a replica have the same answer.
            of_replica.setdefault(replica, answer)
        return parts, [of_replica[replica] for replica in range(len(parts))]

    def _ask_all(self, stage: str, message: Message) -> Any:
        return self._ask(stage, [message] * len(self._processes))[0]

    def _ask(self, stage: str, messages: Sequence[Message]) -> list[Any]:
        if not self._connections:
            # An earlier call met the loss, and its caller carried on.
            raise RankError(self._how_it_ended)
        if self._is_asking:
            # The next answers of the ranks are those to a call that was interrupted.
            self._how_it_ended = (
                "the training ranks were ended, because a call of them was interrupted"
            )
            self._end(kill=True)
            raise RankError(self._how_it_ended)
        self._is_asking = True
        self._send(messages)
        answers = self._collect(stage)
        self._is_asking = False
        return answers

    def _write_weights(self, averaged: bool, path: Path) -> tuple[Any, dict[str, Any]]:
        """Have all ranks write their parts of the weights to a file; return its layout, and the digests of all."""
        assert self._write is not None, "write_weights is None; expected a function for local ranks"
        message = partial(_write_part, self._write, path, averaged)
        answers = self._ask("export_weights", [message] * len(self._processes))
        all_digests: dict[str, Any] = {}
        for _, digests in answers:
            all_digests.update(digests)
        return answers[0][0], all_digests

    def _send(self, messages: Sequence[Message]) -> None:
        for connection, message in zip(self._connections, messages, strict=True):
            with suppress(ConnectionError):  # `_collect` says which rank died, and how
                connection.send(message)

    def _collect(self, stage: str) -> list[Any]:
        """Receive an answer from every rank, in whatever order they come; `RankError` if one hangs."""
        answers: dict[int, Any] = {}
        limit = limit_s(stage, self._longest_s, self._heartbeat_timeout_s)
        # Looks are counted, and not time: this process may have been stopped together with the ranks.
        waited_s = 0.0
        stopped_s = 0.0
        while len(answers) < len(self._connections):
            waiting = [rank for rank in range(len(self._connections)) if rank not in answers]
            ready = wait([self._connections[rank] for rank in waiting], timeout=_POLL_EVERY_S)
            for connection in ready:
                rank = self._connections.index(connection)
                answers[rank] = self._receive(rank)
            if ready:
                continue
            waited_s += _POLL_EVERY_S
            stopped_s += _POLL_EVERY_S
            stopped = [rank for rank in waiting if is_stopped(self._processes[rank].pid or 0)]
            if not stopped:
                stopped_s = 0.0
            if stopped_s >= self._heartbeat_timeout_s:
                problem = f"gave no sign of life for {self._heartbeat_timeout_s:g} s in {stage}"
                self._end_hung(stopped, problem)
            if waited_s >= limit:
                self._end_hung(waiting, f"gave no answer to {stage} within {limit:g} s")
        self._longest_s[stage] = max(waited_s, self._longest_s.get(stage, 0.0))
        return [answer for _, answer in sorted(answers.items())]

    def _end_hung(self, ranks: Sequence[int], problem: str) -> NoReturn:
        """End all ranks because of some that do not answer, once all have written their stacks."""
        lines: list[str] = []
        for rank, process in enumerate(self._processes):
            state = inspect_process(process.pid or 0)
            if rank in ranks:
                lines.append(f"training rank {rank} (process {process.pid}) {problem}: {state}")
        time.sleep(DUMP_S)
        self._how_it_ended = "; ".join(lines)
        self._end(kill=True)
        raise RankError(self._how_it_ended)

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
                how = f"ended with exit code {code}"
                if code < 0:
                    how = f"was killed by {signal.Signals(-code).name}"
                end = describe_end(self._logs[dead], process.pid or 0)
                self._how_it_ended = f"training rank {dead} (process {process.pid}) {how}{end}"
                raise RankError(self._how_it_ended) from error
        assert error is not None
        raise error

    def _end(self, *, kill: bool = False) -> None:
        """End all ranks: at once, or as they see that their pipes are closed."""
        connections = self._connections
        self._connections = []
        self._is_asking = False
        if kill:
            # Before the pipes are closed: another thread may wait for answers.
            for process in self._processes:
                process.kill()
            for process in self._processes:
                process.join()
        for connection in connections:
            connection.close()
        for process in self._processes:
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass
class _RankWeights:
    """The ranks' weights, which they write to a file together: where engines read them, or to memory for one reading.

    ``write`` has the ranks write, and returns the layout of the file, and digests.
    """

    write: Callable[[Path], tuple[Any, dict[str, Any]]]
    open_memory: Callable[[], Any]
    digests: dict[str, Any] = field(default_factory=dict[str, Any])
    """Digests of what was written last."""

    def write_to(self, path: Path) -> Any:
        layout, digests = self.write(path)
        # The same object: it may have been taken before the weights were written.
        self.digests.clear()
        self.digests.update(digests)
        return layout

    def __iter__(self) -> "Iterator[tuple[str, torch.Tensor]]":
        memory = self.open_memory()
        try:
            memory.write(self)
            yield from memory
        finally:
            memory.close()
