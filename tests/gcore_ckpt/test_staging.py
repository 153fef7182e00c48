"""Saves of tensors on CUDA, with a stand-in for its streams that copies as late as CUDA may."""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gcore_ckpt import Checkpointer
from gcore_ckpt.format.boxes import FileLayout
from gcore_ckpt.ranks.shards import Holdings
from gcore_ckpt.saving import staging
from gcore_ckpt.saving.staging import StagedFile, Stager, Staging, Working


class LateStream:
    """Does what was given to it when the host waits for it, and not before."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []

    def synchronize(self) -> None:
        for call in self.queue:
            call()
        self.queue.clear()


class LateCuda(threading.local):
    """Two devices; each thread has a current one and current streams of its own, at first the default ones."""

    def __init__(self) -> None:
        self.device, self.streams = 0, [LateStream(), LateStream()]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        names = ("is_initialized", "device_count", "current_device", "current_stream", "set_stream", "set_device")
        for name in names:
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return self.device

    def current_stream(self, device: torch.device | int) -> LateStream:
        return self.streams[device if isinstance(device, int) else device.index]

    def set_stream(self, stream: LateStream) -> None:
        self.device = OWN.index(stream)  # The stream's device becomes the current one, too.
        self.streams[self.device] = stream

    def set_device(self, device: int) -> None:
        self.device = device


CUDA, OWN = LateCuda(), (LateStream(), LateStream())
PINNED: list[range] = []


class OnCuda(torch.Tensor):
    """A tensor of the host that says it is on a device, and whose copies wait in that device's current stream."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        match func:
            case torch.Tensor.copy_:
                target, source = args
                assert kwargs == {"non_blocking": True}
                assert any(target.data_ptr() in addresses for addresses in PINNED), "copied into pinned memory"
                stream = CUDA.current_stream(source.device)
                assert (stream, CUDA.device) == (OWN[source.device.index], 0), "the caller's device and streams"
                stream.queue.append(partial(target.copy_, source.as_subclass(torch.Tensor)))
                return target
            case _ if func == torch.Tensor.is_cuda.__get__:  # pyright: ignore[reportAttributeAccessIssue]
                return True
            case _ if func == torch.Tensor.device.__get__:  # pyright: ignore[reportAttributeAccessIssue]
                return torch.device("cuda", args[0].ndim % 2)
            case _:
                return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("kind", ["full", "chunked"])
def test_copies_end_before_a_save_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Staging) -> None:
    """Tensors on both devices, in the caller's streams: what changes after the save is not in it."""
    CUDA.install(monkeypatch)
    CUDA.streams, CUDA.device = list(OWN), 0
    monkeypatch.setattr(staging, "CHUNK_BYTES", 1 << 12)
    empty, stage = torch.empty, Stager.stage

    def pinning_empty(size: int, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        tensor = empty(size, **options)
        if pin_memory:
            PINNED.append(range(tensor.data_ptr(), tensor.data_ptr() + size))
        return tensor

    def stage_from_cuda(
        self: Stager, files: Sequence[FileLayout], holdings: Holdings, working: Working
    ) -> Iterator[StagedFile]:
        data = tuple(x.as_subclass(OnCuda) if isinstance(x, torch.Tensor) else x for x in holdings.data)
        return stage(self, files, holdings._replace(data=data), working)

    monkeypatch.setattr(torch, "empty", pinning_empty)
    monkeypatch.setattr(Stager, "stage", stage_from_cuda)
    state = {"vector": torch.arange(3000.0), "matrix": torch.randn(40, 70), "half": torch.randn(9).bfloat16()}
    before = {name: tensor.clone() for name, tensor in state.items()}
    with Checkpointer(tmp_path, staging=kind) as checkpointer:
        for step in (1, 2):  # The memory of the first save is used again.
            handle = checkpointer.save(step, state)
            for tensor in state.values():
                tensor.zero_()
            handle.wait()
            loaded: Any = checkpointer.load(step=step)
            torch.testing.assert_close(loaded, before, rtol=0, atol=0)
            for name, tensor in state.items():
                tensor.copy_(before[name])
    assert PINNED
