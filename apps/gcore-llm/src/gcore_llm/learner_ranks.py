"""A learner whose models are divided among ranks, each a process of its own."""

import asyncio
import dataclasses
import inspect
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gcore_llm.config import TrainConfig
from gcore_llm.learner import LocalLearner, Role, State
from gcore_runs.errors import RankError
from gcore_runs.logs import log_to, logs_of
from gcore_runs.ranks import deal, sendable
from gcore_trainer import MicroBatch

if TYPE_CHECKING:
    import torch

    from gcore_rollout import Digest, DigestedWeights

_PRELOADED = ["gcore_trainer.torch.trainer", "gcore_trainer.torch.frozen_model", "torch._dynamo"]
"""What ranks would import, each for itself."""

_DEATH_S = 0.5
"""How long a rank's error waits for news of another rank's death."""

T = TypeVar("T")

CostOf = Callable[[MicroBatch], float]
"""Simulated work of a micro-batch, in any unit."""


class RankedLearner:
    """The models on ``trainer.num_processes`` ranks, started here and ended with `close`.

    Args:
        config: the run's.
        model: Hugging Face folder to begin with.
        checkpoints: where the ranks leave and find them.
        cost_of: what micro-batches are dealt out evenly by.

    Raises:
        RankError: a rank could not start.
    """

    def __init__(self, config: TrainConfig, model: Path, checkpoints: Path, *, cost_of: CostOf) -> None:
        self._cost_of = cost_of
        self._folder = Path(tempfile.mkdtemp(prefix="gcore-ranks-"))
        size = config.trainer.num_processes
        # Forked from a clean server that has imported torch once: this process may hold an engine, threads and locks.
        context = multiprocessing.get_context("forkserver")
        megatron = ["gcore_trainer.megatron.trainer"] if config.trainer.backend == "megatron" else []
        context.set_forkserver_preload(["gcore_llm.learner_ranks", *_PRELOADED, *megatron])
        self._turn = asyncio.Lock()
        self._processes: list[BaseProcess] = []
        self._connections: list[Any] = []
        arguments = config, model, checkpoints, self._folder / "store", size
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_rank, args=(rank, *arguments, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._replicas: dict[Role, list[tuple[int, int]]] = {}
        for roles in self._collect():
            for role, replica in roles.items():
                self._replicas.setdefault(role, []).append(replica)

    @property
    def num_updates(self) -> int:
        return self._call("num_updates")

    @property
    def num_replicas(self) -> int:
        return self._replicas["actor"][0][1]

    async def score(self, role: Role, micro_batches: Sequence[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        return await self._scored("score", role, micro_batches, role)

    async def score_and_route(
        self, micro_batches: Sequence[MicroBatch]
    ) -> list[list[tuple[NDArray[np.float32], NDArray[np.int16]]]]:
        return await self._scored("score_and_route", "actor", micro_batches)

    async def train_step(self, role: Role, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        parts = self._dealt(role, micro_batches)
        return (await self._call_replicas("train_step", role, micro_batches, parts, role))[0]

    def export_weights(self) -> "DigestedWeights":
        from gcore_rollout import DigestedWeights

        digests: dict[str, Mapping[str, Digest]] = {}
        return DigestedWeights(self._exported(digests), digests=digests)

    def _exported(self, digests: "dict[str, Mapping[str, Digest]]") -> "Iterator[tuple[str, torch.Tensor]]":
        """The weights from rank 0, whose digests of them are put into ``digests``."""
        import torch

        self._send([("export_weights", ())] * len(self._connections))
        while (header := self._receive(0)) is not None:
            name, dtype, shape, digests[name] = header
            data = torch.empty(shape, dtype=dtype)
            if data.numel():
                self._connections[0].recv_bytes_into(data.reshape(-1).view(torch.uint8).numpy())
            yield name, data
        self._collect()

    def save_pretrained(self, path: Path) -> None:
        self._call("save_pretrained", path)

    def save(self, step: int, rest: State) -> None:
        self._call("save", step, rest)

    def load(self) -> State:
        return self._call("load")

    def close(self) -> None:
        """Wait for checkpoints to be written and end the ranks; does nothing after the first time."""
        if not self._connections:
            return
        self._call("close")
        connections, self._connections = self._connections, []
        for process, connection in zip(self._processes, connections, strict=True):
            process.join()
            connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _dealt(self, role: Role, micro_batches: Sequence[MicroBatch]) -> list[list[int]]:
        return deal([self._cost_of(batch) for batch in micro_batches], self._replicas[role][0][1])

    async def _scored(self, method: str, role: Role, micro_batches: Sequence[MicroBatch], *arguments: Any) -> list[Any]:
        """What the replicas answer for each micro-batch."""
        parts = self._dealt(role, micro_batches)
        results = await self._call_replicas(method, role, micro_batches, parts, *arguments)
        found = {i: values for r, part in enumerate(parts) for i, values in zip(part, results[r], strict=True)}
        return [found[i] for i in range(len(micro_batches))]

    async def _call_replicas(
        self, method: str, role: Role, micro_batches: Sequence[MicroBatch], parts: list[list[int]], *arguments: Any
    ) -> list[Any]:
        """The answer of each replica, whose ranks all get its micro-batches behind the other arguments."""
        replica_of = [replica for replica, _ in self._replicas[role]]
        messages = [(method, (*arguments, [micro_batches[i] for i in parts[r]])) for r in replica_of]
        async with self._turn:
            answers = await _to_its_end(self._ask, messages)
        return [answers[replica_of.index(r)] for r in range(len(parts))]

    def _call(self, method: str, *arguments: Any) -> Any:
        if not self._connections:
            raise RankError("the training ranks have ended")
        return self._ask([(method, arguments)] * len(self._connections))[0]

    def _ask(self, messages: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        """Send each rank its message; all answers, by rank."""
        self._send(messages)
        return self._collect()

    def _send(self, messages: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        for connection, message in zip(self._connections, messages, strict=True):
            with suppress(BrokenPipeError):  # `_collect` says who died, and how
                connection.send(message)

    def _collect(self) -> list[Any]:
        """An answer from every rank, in whatever order they come."""
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
            from gcore_ckpt import CheckpointError

            # A rank that misses another may say so before it is known that the other has died.
            if isinstance(error, RankError | CheckpointError) and (dead := self._dead_rank()) is not None:
                raise self._death_of(dead) from error
            self._kill()
            raise error
        return value

    def _dead_rank(self) -> int | None:
        """A rank that has ended by a signal or with an error, or does so soon."""
        until_s = time.monotonic() + _DEATH_S
        while True:
            for rank, process in enumerate(self._processes):
                if process.exitcode:
                    return rank
            if time.monotonic() > until_s:
                return None
            time.sleep(0.02)

    def _death_of(self, rank: int) -> RankError:
        """How a rank has ended; the others are ended, too."""
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


async def _to_its_end(call: Callable[..., T], *arguments: Any) -> T:
    """Make a call in a thread, and wait for its end even if the caller is cancelled: the ranks' answers are for it."""
    task = asyncio.create_task(asyncio.to_thread(call, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _run_rank(
    rank: int, config: TrainConfig, model: Path, checkpoints: Path, store: Path, size: int, connection: Connection
) -> None:
    """One rank: answers calls of `LocalLearner`'s methods until the pipe is closed or `close` is called."""
    log_to(logs_of(checkpoints), "trainer", rank, redirect=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main process decides
    os.environ["OMP_NUM_THREADS"] = str(config.threads)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    device = torch.device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        config = dataclasses.replace(config, device=str(device))
    try:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size)
        learner = LocalLearner(config, model, checkpoints)
        connection.send((None, {role: learner.replicas(role) for role in learner.roles}))
        while True:
            method, arguments = connection.recv()
            if method == "export_weights":
                _export(learner, connection if rank == 0 else None)
                connection.send((None, None))
            elif method == "num_updates":
                connection.send((None, learner.num_updates))
            else:
                answer = getattr(learner, method)(*arguments)
                connection.send((None, asyncio.run(answer) if inspect.iscoroutine(answer) else answer))
            if method == "close":
                return
    except (EOFError, BrokenPipeError):  # the main process is gone
        return
    except Exception as error:
        with suppress(OSError):
            connection.send((sendable(error), None))
    finally:
        os._exit(0)  # groups whose other ranks are gone would wait for them


def _export(learner: LocalLearner, connection: Connection | None) -> None:
    import torch

    weights = learner.export_weights()
    for name, tensor in weights:
        if connection is None:
            continue
        data = tensor.detach().cpu().contiguous()
        connection.send((None, (name, data.dtype, tuple(data.shape), weights.digests[name])))
        if data.numel():
            connection.send_bytes(data.reshape(-1).view(torch.uint8).numpy().data)
    if connection is not None:
        connection.send((None, None))
