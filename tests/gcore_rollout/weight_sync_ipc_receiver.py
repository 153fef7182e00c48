"""The other process of the tests of CUDA IPC, and a stand-in on CPU for memory that processes of one GPU share."""

import mmap
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from gcore_rollout import HFEngine, VLLMEngine
from gcore_rollout.weight_sync.shared_weights import SharedCudaWeights, open_weights

GPU = "GPU-of-the-tests"
OPENED_BY = "TEST_OPENED_BY"
"""Variable with the path of a file for the numbers of the processes that open `WeightsInFiles`."""


def receive(connection: Connection) -> None:
    tensors = open_weights(connection.recv_bytes())
    seen = [(name, tensor.dtype, tensor.tolist()) for name, tensor in tensors]
    del tensors
    torch.cuda.synchronize()
    connection.send(seen)


class WeightsInFiles(SharedCudaWeights):
    """As on a GPU, but in files in memory."""

    def __init__(self, weights: Any, *, bucket_bytes: int = 1 << 14) -> None:
        self._fds: dict[int, int] = {}
        super().__init__(weights, bucket_bytes=bucket_bytes)

    @property
    def gpu(self) -> str | None:
        return GPU

    def overwrite(self) -> None:
        for bucket in self._buckets:
            bucket.buffer().fill_(255)

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        assert tensor.device.type == "cpu", name

    def _allocate(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        assert device.type == "cpu"
        fd = os.memfd_create("test")
        os.ftruncate(fd, size_bytes)
        buffer = torch.frombuffer(mmap.mmap(fd, size_bytes), dtype=torch.uint8)
        self._fds[buffer.data_ptr()] = fd
        return buffer

    def _share(
        self, buffer: torch.Tensor
    ) -> tuple[str | None, Callable[..., torch.Tensor], tuple[Any, ...]]:
        return GPU, map_file, (f"/proc/{os.getpid()}/fd/{self._fds[buffer.data_ptr()]}",)


def map_file(path: str) -> torch.Tensor:
    log = os.environ.get(OPENED_BY)
    if log:
        with Path(log).open("a") as pids:
            pids.write(f"{os.getpid()}\n")
    with Path(path).open("r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


class EngineOnTheGPU(HFEngine):
    """It reports the GPU of `WeightsInFiles` as its own."""

    @property
    def weights_gpu(self) -> str | None:
        return GPU


class RanksOnTheGPU(VLLMEngine):
    """Its ranks can open `WeightsInFiles`."""

    @property
    def weights_gpu(self) -> str | None:
        return GPU
