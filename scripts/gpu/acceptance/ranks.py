"""Processes on one device that are ranks of a process group, and messages between them through host memory."""

import multiprocessing
import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any, Self, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from acceptance.report import last_lines
from acceptance.trial import Trial

GLOO = "cpu:gloo,cuda:gloo"
"""NCCL refuses two ranks on one GPU."""
LIMIT_S = 90.0
"""Most seconds of a check."""
_CUDA_LIMIT_S = 60.0


class Ranks:
    """Ranks of one process group on the trial's device, which call a function of this package together.

    Args:
        function: called by each rank with the trial and ``arguments``; what it returns and takes can be pickled.
        timeout_s: limit of a collective.
    """

    def __init__(
        self,
        trial: Trial,
        function: Callable[..., Any],
        *arguments: object,
        size: int,
        backend: str = GLOO,
        timeout_s: float = 60.0,
    ) -> None:
        context: Any = multiprocessing.get_context(start_method(trial.device))
        options: dict[str, Any] = {
            "backend": backend,
            "init_method": f"file://{trial.work}/rendezvous-{uuid.uuid4().hex}",
            "world_size": size,
            "timeout": timedelta(seconds=timeout_s),
        }
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            call = (trial, function, arguments, {**options, "rank": rank}, theirs)
            process = context.Process(target=_run_rank, args=call, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(mine)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes, also those that are stopped."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def outcome(self, rank: int, limit_s: float) -> tuple[Any, str]:
        """Return what a rank returned, and its error, which is empty if there was none."""
        if not self._connections[rank].poll(limit_s):
            return None, f"no answer after {limit_s:.0f} s"
        try:
            return self._connections[rank].recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join()
            return None, f"ended with exit code {self._processes[rank].exitcode}"

    def collect(self, limit_s: float) -> list[Any]:
        """Return what each rank returned; `RuntimeError` with the error of the first one that failed."""
        deadline = time.monotonic() + limit_s
        values: list[Any] = [None] * len(self._connections)
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                ranks = ", ".join(map(str, waiting.values()))
                raise RuntimeError(f"no answer of ranks {ranks} after {limit_s:.0f} s")
            for connection in ready:
                rank = waiting.pop(cast("Connection", connection))
                values[rank], error = self.outcome(rank, 0.0)
                if error:
                    raise RuntimeError(f"rank {rank}: {error}")
        return values


def run(
    trial: Trial, function: Callable[..., Any], *arguments: object, size: int, **options: Any
) -> list[Any]:
    """Call a function in ranks of their own, at most `LIMIT_S`; return what each of them returned."""
    with Ranks(trial, function, *arguments, size=size, **options) as ranks:
        return ranks.collect(LIMIT_S)


@cache
def start_method(device: str) -> str:
    """Return fork, by which a process has what this one has imported, unless CUDA cannot be used after it."""
    if not device.startswith("cuda"):
        return "fork"
    process = multiprocessing.get_context("fork").Process(target=torch.cuda.init, daemon=True)
    process.start()
    process.join(_CUDA_LIMIT_S)
    if process.exitcode == 0:
        return "fork"
    process.kill()
    return "spawn"


def _run_rank(
    trial: Trial,
    function: Callable[..., Any],
    arguments: tuple[object, ...],
    options: dict[str, Any],
    connection: Connection,
) -> None:
    value: Any = None
    error = ""
    torch.set_num_threads(1)
    # Not by the name of the host, which a machine without a network may not know.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        if trial.device == "cuda":
            torch.cuda.set_device(0)
        if "nccl" in options["backend"]:
            options["device_id"] = torch.device("cuda", 0)
        dist.init_process_group(**options)
        with staged_messages():
            value = function(trial, *arguments)
    except Exception:
        error = last_lines(traceback.format_exc())
    connection.send((value, error))
    sys.stdout.flush()
    sys.stderr.flush()
    # The threads of process groups may wait for ranks that have ended.
    os._exit(0)


@contextmanager
def staged_messages() -> Generator[None]:
    """Send and receive through host memory inside the block, pinned for CUDA, whose tensors gloo does not send."""
    isend: Any = dist.isend
    irecv: Any = dist.irecv

    def send_staged(tensor: torch.Tensor, *arguments: Any, **options: Any) -> _Arrival:
        host = _host_memory(tensor).copy_(tensor.detach())
        return _Arrival(isend(host, *arguments, **options), host, None)

    def receive_staged(tensor: torch.Tensor, *arguments: Any, **options: Any) -> _Arrival:
        host = _host_memory(tensor)
        return _Arrival(irecv(host, *arguments, **options), host, tensor)

    # `torch.distributed` compares operations with these by identity.
    staged: dict[str, Any] = {"isend": send_staged, "irecv": receive_staged}
    with mock.patch.multiple(dist, **staged), mock.patch.multiple(distributed_c10d, **staged):
        yield


def _host_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class _Arrival:
    """A message in host memory; waiting for it copies it to its tensor if it was received."""

    def __init__(self, work: Any, host: torch.Tensor, tensor: torch.Tensor | None) -> None:
        self._work = work
        self._host = host
        self._tensor = tensor

    def wait(self) -> None:
        self._work.wait()
        if self._tensor is not None:
            self._tensor.detach().copy_(self._host)
