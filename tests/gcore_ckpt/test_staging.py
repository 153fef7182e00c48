"""Saves of tensors on CUDA, with stand-ins: streams that copy as late as CUDA may, and its register of host memory."""

import gc
import logging
import mmap
import re
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gcore_ckpt import Checkpointer
from gcore_ckpt.format.boxes import FileLayout
from gcore_ckpt.ranks.shards import Holdings
from gcore_ckpt.saving import staging
from gcore_ckpt.saving.host_memory import allocate
from gcore_ckpt.saving.staging import Arena, StagedFile, Stager, Staging, Working
from gcore_ckpt.threads import Workers

PAGE = mmap.PAGESIZE


def mapping_of(address: int) -> dict[str, str]:
    """Return what the system says of the mapping that an address is in."""
    found: dict[str, str] = {}
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"(\w+)-(\w+) ", line):
            start, end = (int(number, 16) for number in match.groups())
            is_inside = start <= address < end
        elif is_inside:
            name, _, value = line.partition(":")
            found[name] = value.strip()
    return found


class HostRegister:
    """Stands in for `torch.cuda.cudart()`: the pinned memory, by address, with its size and the device it is for."""

    def __init__(self) -> None:
        self.pinned: dict[int, tuple[int, int]] = {}
        self.refused: list[int] = []
        self.is_full = False

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        assert int(mapping_of(address)["Rss"].split()[0]) << 10 >= size_bytes, "the pages are there"
        if self.is_full:
            self.refused.append(size_bytes)
            return 2
        self.pinned[address] = size_bytes, CUDA.device
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert mapping_of(address), "unregistered before it is unmapped"
        _, device = self.pinned.pop(address)
        assert device == CUDA.device
        return 0

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return {2: "out of memory"}[error]

    def holds(self, address: int) -> bool:
        return any(
            start <= address < start + size_bytes for start, (size_bytes, _) in self.pinned.items()
        )


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
        self.streams, self.device = list(OWN), 0
        names = (
            "is_initialized",
            "device_count",
            "current_device",
            "current_stream",
            "set_stream",
            "set_device",
        )
        for name in (*names, "use_device"):
            monkeypatch.setattr(torch.cuda, name.replace("use_", ""), getattr(self, name))

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

    @contextmanager
    def use_device(self, device: int) -> Generator[None]:
        before, self.device = self.device, device
        yield
        self.device = before


CUDA, OWN = LateCuda(), (LateStream(), LateStream())


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> HostRegister:
    """Return the register of host memory of `CUDA`, which this installs."""
    CUDA.install(monkeypatch)
    register = HostRegister()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: register)
    return register


class OnCuda(torch.Tensor):
    """A tensor of the host that says it is on a device, and whose copies wait in that device's current stream."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        match func:
            case torch.Tensor.copy_:
                target, source = args
                assert kwargs == {"non_blocking": True}
                register: Any = torch.cuda.cudart()
                assert register.holds(target.data_ptr()) != register.is_full, (
                    "copied into pinned memory"
                )
                stream = CUDA.current_stream(source.device)
                assert (stream, CUDA.device) == (OWN[source.device.index], 0), (
                    "the caller's device and streams"
                )
                stream.queue.append(partial(target.copy_, source.as_subclass(torch.Tensor)))
                return target
            case _ if func == torch.Tensor.is_cuda.__get__:  # pyright: ignore[reportAttributeAccessIssue]
                return True
            case _ if func == torch.Tensor.device.__get__:  # pyright: ignore[reportAttributeAccessIssue]
                return torch.device("cuda", args[0].ndim % 2)
            case _:
                return super().__torch_function__(func, types, args, kwargs or {})


def put_states_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage the tensors of a state as those of CUDA."""
    stage = Stager.stage

    def stage_from_cuda(
        self: Stager, files: Sequence[FileLayout], holdings: Holdings, working: Working
    ) -> Iterator[StagedFile]:
        data = tuple(
            x.as_subclass(OnCuda) if isinstance(x, torch.Tensor) else x for x in holdings.data
        )
        devices = frozenset(x.device for x in data if isinstance(x, torch.Tensor))
        return stage(self, files, holdings._replace(data=data, devices=devices), working)

    monkeypatch.setattr(Stager, "stage", stage_from_cuda)


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("kind", ["full", "chunked"])
def test_copies_end_before_a_save_returns(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    register: HostRegister,
    kind: Staging,
    is_full: bool,
) -> None:
    """Tensors on both devices, in the caller's streams: what changes after the save is not in it."""
    register.is_full = is_full
    monkeypatch.setattr(staging, "CHUNK_BYTES", 1 << 12)
    put_states_on_cuda(monkeypatch)
    state = {
        "vector": torch.arange(3000.0),
        "matrix": torch.randn(40, 70),
        "half": torch.randn(9).bfloat16(),
    }
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
        assert register.refused if is_full else register.pinned
    gc.collect()
    assert not register.pinned


@pytest.mark.usefixtures("register")
def test_a_copy_that_fails_leaves_none_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("no memory for a copy")

    put_states_on_cuda(monkeypatch)
    monkeypatch.setattr(staging, "_in_jobs", refuse)
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(MemoryError, match="no memory for a copy"):
            checkpointer.save(1, {"x": torch.ones(3)})
        assert not any(stream.queue for stream in OWN)


def test_pinned_memory_is_as_large_as_needed_and_is_unregistered_once_it_is_unused(
    register: HostRegister,
) -> None:
    CUDA.set_device(1)
    with Workers(2) as workers:
        arena = Arena(workers)
        small = arena.reserve(5 * PAGE, pinned=True)
        small_address = small.ctypes.data
        assert register.pinned == {small_address: (5 * PAGE, 1)}
        assert arena.reserve(4 * PAGE, pinned=False) is small
        piece = small[PAGE:].data
        del small
        large = arena.reserve(600 * PAGE, pinned=False)
        assert register.pinned == {small_address: (5 * PAGE, 1), large.ctypes.data: (600 * PAGE, 1)}
        piece[:] = bytes(len(piece))
        CUDA.set_device(0)
        del piece
        assert register.pinned == {large.ctypes.data: (600 * PAGE, 1)}
        assert arena.reserve(600 * PAGE, pinned=True) is large
        del large, arena
    assert not register.pinned
    assert CUDA.device == 0


def test_memory_that_cuda_does_not_pin_is_used_all_the_same(
    register: HostRegister, caplog: pytest.LogCaptureFixture
) -> None:
    register.is_full = True
    with Workers(2) as workers, caplog.at_level(logging.WARNING, logger="gcore_ckpt"):
        arena = Arena(workers)
        memory = arena.reserve(1 << 22, pinned=True)
        assert arena.reserve(1 << 20, pinned=True) is memory
        assert register.refused == [1 << 22]
        [warning] = caplog.messages
        assert (
            "CUDA cannot pin 4 MiB of host memory (cudaHostRegister: error 2, out of memory)"
            in warning
        )
        assert "ulimit -l" in warning
        del memory
        register.is_full = False
        memory = arena.reserve((1 << 22) + PAGE, pinned=True)
        assert register.pinned == {memory.ctypes.data: ((1 << 22) + PAGE, 0)}


def test_memory_is_of_huge_pages_and_not_copied_to_forked_processes() -> None:
    memory = allocate(4 << 20)
    assert {"hg", "wf"} <= set(mapping_of(memory.ctypes.data)["VmFlags"].split())
