"""Named tensors in memory that other processes open in place: shared memory, or a GPU's by CUDA IPC."""

import asyncio
import mmap
import os
import pickle
import re
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from gcore_rollout.errors import RolloutError, require
from gcore_rollout.weight_sync.digests import DigestedWeights, Digests, digests_of
from gcore_rollout.weight_sync.layout import Layout, Packing, TensorSpec, unpack
from gcore_rollout.weight_sync.staging import stage_each

_native: Any = torch._C  # pyright: ignore[reportPrivateUsage] - the settings of the allocator have no public name

_settings: list[str] = []
"""The latest settings that were set here, for versions of torch (2.11) that do not say what they are."""
_EXPANDABLE = re.compile(r"\s*expandable_segments\s*:\s*(true|1)\b", re.IGNORECASE)
_MAX_MAPPINGS = 2
_DEVICE_ARGUMENT = 6
"""Index of the argument of `rebuild_cuda_tensor` that is the sender's number of the device."""


class _Memory(Packing):
    """Anonymous shared memory, which the kernel frees with its last user; a view keeps its mapping alive."""

    def __init__(self) -> None:
        super().__init__()
        self.fd = os.memfd_create("gcore-weights")
        self.readers: set[asyncio.Future[None]] = set()
        self._mapping = torch.empty(0, dtype=torch.uint8)

    @property
    def path(self) -> Path:
        return Path(f"/proc/{os.getpid()}/fd/{self.fd}")

    def buffer(self, size_bytes: int = 0) -> torch.Tensor:
        """Return the memory, with at least so many bytes; what it has is kept."""
        if not self._mapping.numel() or size_bytes > self._mapping.numel():
            # Twice as much as before: unwritten pages take no memory, and mapping again takes time.
            capacity_bytes = max(size_bytes, 2 * self._mapping.numel(), mmap.PAGESIZE)
            os.ftruncate(self.fd, capacity_bytes)
            self._mapping = torch.frombuffer(mmap.mmap(self.fd, capacity_bytes), dtype=torch.uint8)
        return self._mapping


class SharedWeights:
    """One model's weights in anonymous shared memory, written once for any number of engines.

    Iterating yields (name, tensor) views of the memory, so it can be given to `update_weights` of any engine. An
    `EngineProcess` does not iterate: it maps the same memory, and an engine that can do so uses the weights in place.
    New weights are then written to a second memory, and the ones after these to the first. Weights are complete before
    an engine takes the first of them, so that a sender which fails half-way leaves every engine with its old ones.
    Linux only.

    Example:
        >>> shared = SharedWeights()
        >>> shared.write([("embedding", torch.zeros(4, 2)), ("head", torch.ones(3))])
        >>> dict(shared)["head"]
        tensor([1., 1., 1.])
        >>> engine_weights = {name: tensor.clone() for name, tensor in shared}
        >>> shared.close()
    """

    def __init__(self) -> None:
        self._memories: list[_Memory] = []
        self._present: _Memory | None = None
        self._is_closed = False
        self.digests: Digests = {}
        """Digests that the weights came with; empty if there were none."""
        self.num_writes = 0
        """Number of calls of `write`: two equal numbers mean the same weights."""

    @property
    def layout(self) -> Layout:
        """The specs of the tensors, in order; a `RolloutError` if nothing has been written, or not completely."""
        return self._require_memory().layout

    @property
    def is_whole(self) -> bool:
        """True if there are weights."""
        return self._present is not None

    def fileno(self) -> int:
        """The file descriptor of the memory that holds the weights; another write may make it another."""
        return self._require_memory().fd

    @property
    def path(self) -> Path:
        """The path by which processes of this machine open that memory, as long as this one keeps it."""
        return self._require_memory().path

    def write(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy weights, one at a time, to memory without readers, so that the weights in use stay as they are.

        Weights with a method ``write_to`` are written by other processes: it is called with the path of the memory, and
        returns what `write_part` returns.
        """
        if self._is_closed:
            raise RolloutError("the shared weights are closed")
        self._present = None
        # Memory of an earlier write, or new; other memories without readers are freed.
        unused = [memory for memory in self._memories if not memory.readers] or [_Memory()]
        memory = unused[0]
        for superfluous in unused[1:]:
            os.close(superfluous.fd)
        self._memories = [memory] + [in_use for in_use in self._memories if in_use.readers]
        self.num_writes += 1
        memory.layout = {}
        memory.size_bytes = 0
        memory.buffer()
        write_to = getattr(weights, "write_to", None)
        if write_to is not None:
            memory.layout, memory.size_bytes = write_to(memory.path)
            memory.buffer(memory.size_bytes)
        else:
            for name, tensor in stage_each(weights):
                memory.add(name, tensor)
        self._present = memory
        self.digests = dict(digests_of(weights))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        memory = self._require_memory()
        return unpack(memory.buffer(), memory.layout)

    @contextmanager
    def reading(self) -> Generator[None]:
        """Prevent writes over the current weights inside the block."""
        reader = asyncio.get_running_loop().create_future()
        self.read_until(reader)
        try:
            yield
        finally:
            reader.set_result(None)

    def read_until(self, reader: "asyncio.Future[None]") -> None:
        """Prevent writes over the current weights until this future is done."""
        readers = self._require_memory().readers
        readers.add(reader)
        reader.add_done_callback(readers.discard)

    def close(self) -> None:
        """Free the memory, once the last engine that reads it has released it. Idempotent."""
        for memory in self._memories:
            os.close(memory.fd)
        self._memories.clear()
        self._present = None
        self._is_closed = True

    def _require_memory(self) -> _Memory:
        if self._present is None:
            raise RolloutError(
                "there are no weights: nothing was written, writing failed, or the memory was closed"
            )
        return self._present


class SharedWeightsReader:
    """Reader of another process's weights. It keeps mappings for later updates: making one takes time."""

    def __init__(self) -> None:
        self._mappings: dict[int, torch.Tensor] = {}

    def read(self, fd: int, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
        """Return read-only views of the memory; the descriptor is closed at once."""
        try:
            now = os.fstat(fd)
            mapping = self._mappings.pop(now.st_ino, None)
            if mapping is None or mapping.numel() < now.st_size:
                with warnings.catch_warnings():
                    # A write must fail and not change the weights.
                    warnings.filterwarnings(
                        "ignore", "The given buffer is not writable", UserWarning
                    )
                    mapping = torch.frombuffer(
                        mmap.mmap(fd, 0, access=mmap.ACCESS_READ), dtype=torch.uint8
                    )
        finally:
            os.close(fd)
        # Least recently used first; dropping a mapping frees memory of a sender that has ended.
        self._mappings[now.st_ino] = mapping
        while len(self._mappings) > _MAX_MAPPINGS:
            del self._mappings[next(iter(self._mappings))]
        return unpack(mapping, layout)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a view of memory that has been read, and may be written again."""
        address = tensor.untyped_storage().data_ptr()
        return any(address == mapping.data_ptr() for mapping in self._mappings.values())


class SharedCudaWeights:
    """A copy of one model's weights on their CUDA device, for processes that compute on the same GPU.

    Iterating yields (name, tensor) views, so it can be given to `update_weights` of any engine; an `EngineProcess` on
    this GPU opens the memory by CUDA IPC instead, and copies from there. The copy takes the memory of the weights once,
    in buffers that one handle opens each, until `close`. Call that only once every receiver has released its views; a
    receiver that dies before that leaves the buffers to this process until it ends.

    Args:
        weights: Hugging Face names and full tensors, requested one by one.
        bucket_bytes: size of a buffer; a larger tensor has one of its own.

    Raises:
        ValueError: a tensor is not on a CUDA device.

    Example:
        >>> def publish(model: torch.nn.Module) -> bytes:
        ...     return SharedCudaWeights(model.state_dict().items()).handles()
        >>> publish(torch.nn.Linear(2, 3))
        Traceback (most recent call last):
            ...
        ValueError: weight 'weight' is on cpu; expected a CUDA device
    """

    num_writes = 1

    def __init__(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, bucket_bytes: int = 256 << 20
    ) -> None:
        require("bucket_bytes", bucket_bytes, bucket_bytes >= 1, "at least 1", ValueError)
        self._pools: dict[torch.device, Any] = {}
        self._buckets: list[Packing] = []
        for name, tensor in weights:
            self._check(name, tensor)
            bucket = self._buckets[-1] if self._buckets else None
            if bucket is None or bucket.buffer().device != tensor.device or not bucket.fits(tensor):
                size_bytes = max(bucket_bytes, tensor.nbytes)
                bucket = Packing(self._allocate(size_bytes, tensor.device))
                self._buckets.append(bucket)
            bucket.add(name, tensor.detach())
        for device in self._pools:
            torch.cuda.synchronize(device)
        self.digests: Digests = dict(digests_of(weights))
        """Digests that the weights came with; empty if there were none."""

    @property
    def gpu(self) -> str | None:
        """The UUID of the GPU; None: there are no weights, or on several GPUs."""
        gpus = {_uuid(device) for device in self._pools}
        if len(gpus) != 1:
            return None
        return gpus.pop()

    @property
    def is_whole(self) -> bool:
        """True until `close`."""
        return bool(self._buckets)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in self._buckets:
            yield from unpack(bucket.buffer(), bucket.layout)

    def reading(self) -> AbstractContextManager[None]:
        """Do nothing: the weights are never overwritten."""
        return nullcontext()

    def handles(self) -> bytes:
        """Return the handles that one receiver opens once; each receiver must trust this process."""
        return pickle.dumps(
            [(*self._share(bucket.buffer()), bucket.layout) for bucket in self._buckets]
        )

    def close(self) -> None:
        """Return the memory to the device. Idempotent."""
        self._buckets.clear()
        if self._pools:
            torch.cuda.ipc_collect()
            # The memory of a pool goes back with it.
            self._pools.clear()

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        if not tensor.is_cuda:
            raise ValueError(f"weight {name!r} is on {tensor.device}; expected a CUDA device")

    def _allocate(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        return allocate_shareable(size_bytes, device, self._pools)

    def _share(
        self, buffer: torch.Tensor
    ) -> tuple[str | None, Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the GPU of a buffer, and a function with arguments that opens the buffer in another process."""
        rebuild, arguments = reduce_tensor(buffer)
        return _uuid(buffer.device), rebuild, arguments


class OpenedWeights:
    """The side of an engine: weights in the memory of another process, to be copied. Iterating opens the memory.

    The sender must be trusted, as with every pickle. Devices are matched by their UUID, because the two processes may
    number them differently.

    Raises:
        ValueError: this process does not see the sender's GPU.
    """

    def __init__(self, handles: bytes) -> None:
        self.handles = handles
        self._tensors: list[tuple[str, torch.Tensor]] = []

    @property
    def layout(self) -> Layout:
        """The specs of all tensors."""
        layout: dict[str, TensorSpec] = {}
        for *_, specs in pickle.loads(self.handles):
            layout.update(specs)
        return layout

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._tensors = self._tensors or open_weights(self.handles)
        return iter(self._tensors)

    def release(self) -> None:
        """Wait until the copies are made, and release the memory. Idempotent."""
        if any(tensor.is_cuda for _, tensor in self._tensors):
            torch.cuda.synchronize()
        self._tensors.clear()


def open_weights(handles: bytes) -> list[tuple[str, torch.Tensor]]:
    """Open the sender's weights: names and views of its memory, which must not be written to.

    Devices are matched by their UUID, because the two processes may number them differently. Copy the needed tensors,
    wait for the copies (``torch.cuda.synchronize``), drop the views, and notify the sender, which must be trusted, as
    with every pickle. `ValueError` if this process does not see the sender's GPU.
    """
    devices = {_uuid(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())}
    opened: list[tuple[str, torch.Tensor]] = []
    for uuid, rebuild, shared_arguments, layout in pickle.loads(handles):
        arguments: list[Any] = list(shared_arguments)
        if rebuild is rebuild_cuda_tensor:
            if uuid not in devices:
                raise ValueError(
                    f"weight {next(iter(layout))!r} is on GPU {uuid}: this process sees {sorted(devices)}"
                )
            arguments[_DEVICE_ARGUMENT] = devices[uuid]
        opened += unpack(rebuild(*arguments), layout)
    return opened


def share_a_gpu(weights_gpu: str | None, engine_gpu: str | None) -> bool:
    """Return whether weights go by CUDA IPC; otherwise they go through shared memory."""
    return weights_gpu is not None and weights_gpu == engine_gpu


def copy_weights(
    weights: Iterable[tuple[str, torch.Tensor]],
    engine_gpus: Sequence[str | None],
    in_host: SharedWeights,
) -> SharedCudaWeights | SharedWeights:
    """Copy weights once for all engines: on the weights' GPU if one of the engines is there, otherwise to ``in_host``.

    Args:
        engine_gpus: UUID of the GPU of each engine's weights; None: they are on none.
    """
    weights_gpu: str | None = None
    # Those that other processes write are in the host's memory once they are written.
    if not hasattr(weights, "write_to"):
        rest = iter(weights)
        first = list(islice(rest, 1))
        for _, tensor in first:
            weights_gpu = gpu_of(tensor.device)
        weights = DigestedWeights(chain(first, rest), digests=digests_of(weights))
    if any(share_a_gpu(weights_gpu, gpu) for gpu in engine_gpus):
        return SharedCudaWeights(weights)
    in_host.write(weights)
    return in_host


def choose_sources(
    weights: Any, engine_gpus: Sequence[str | None], in_host: SharedWeights
) -> list[Any]:
    """Return the weights that each engine reads: engines on another GPU than the weights read a copy, ``in_host``."""
    if not isinstance(weights, SharedCudaWeights):
        return [weights] * len(engine_gpus)
    on_gpu = [share_a_gpu(weights.gpu, gpu) for gpu in engine_gpus]
    if not all(on_gpu):
        in_host.write(weights)
    return [weights if is_on_gpu else in_host for is_on_gpu in on_gpu]


def gpu_of(device: torch.device) -> str | None:
    """Return the UUID of a CUDA device; None: it is another kind of device."""
    return _uuid(device) if device.type == "cuda" else None


def allocate_shareable(
    size_bytes: int, device: torch.device, pools: dict[torch.device, Any]
) -> torch.Tensor:
    """Return memory that other processes can open, uint8 [size_bytes]; on CUDA it is one of the device's pool."""
    if device.type != "cuda":
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)
    if device not in pools:
        pools[device] = torch.cuda.MemPool()
    with plain_segments(), torch.cuda.use_mem_pool(pools[device], device):
        return torch.empty(size_bytes, dtype=torch.uint8, device=device)


@contextmanager
def plain_segments() -> Generator[None]:
    """Have torch allocate CUDA memory in plain segments inside the block.

    To open an expandable one, another process has to take a file descriptor out of this one (``pidfd_getfd``), which
    containers do not allow.
    """
    settings = allocator_settings()
    plain = without_expandable_segments(settings)
    if plain == settings:
        yield
        return
    # The whole text: torch resets every option that is not in it.
    set_allocator_settings(plain)
    try:
        yield
    finally:
        set_allocator_settings(settings)


def without_expandable_segments(settings: str) -> str:
    """Return torch's allocator settings (``NAME:VALUE,...``) with expandable segments turned off if they are on."""
    return _EXPANDABLE.sub("expandable_segments:False", settings)


def allocator_settings() -> str:
    """Return torch's settings of the CUDA allocator: those that were set, or of the environment."""
    settings = ""
    get = getattr(_native, "_accelerator_getAllocatorSettings", None)
    if get is not None:
        settings = get()
    elif _settings:
        settings = _settings[0]
    return (
        settings
        or os.environ.get("PYTORCH_ALLOC_CONF")
        or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
        or ""
    )


def set_allocator_settings(settings: str) -> None:
    """Change torch's settings of the CUDA allocator; all that are not named are reset."""
    older = "_cuda_cudaCachingAllocator_set_allocator_settings"
    put = getattr(_native, "_accelerator_setAllocatorSettings", None) or getattr(_native, older)
    put(settings)
    _settings[:] = [settings]


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
