"""Broadcast of weights from one rank of a torch.distributed process group: NCCL between GPUs, gloo between hosts.

Tensors are sent in buckets, one flat buffer each. Every bucket follows a header of four integers: the kind of message,
the version, and the sizes of the bucket's layout and of its buffer. The layout (names, shapes, data types) is sent only
if it differs from that of the same bucket the last time.
"""

import json
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count, cycle
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gcore_rollout.errors import PeerLostError, WeightSyncError, require
from gcore_rollout.weight_sync.layout import Layout, PackedTensors, aligned, from_json, to_json, unpacked
from gcore_rollout.weight_sync.updates import FullWeights

_BUCKET, _END, _FAILED = 0, 1, 2


class WeightSender:
    """The rank that has the weights. While a bucket is sent, the next is filled with what the iterable makes.

    Args:
        group: of the sender and its receivers, all of which make their calls in the same order. How long a rank waits
            for another that is silent is the group's timeout.
        device: of the buffers; the group's backend must be able to send from it.
        bucket_bytes: size of a buffer; a larger tensor has one of its own.
    """

    def __init__(self, group: dist.ProcessGroup, *, device: str = "cpu", bucket_bytes: int = 256 << 20) -> None:
        require("bucket_bytes", bucket_bytes, bucket_bytes >= 1, "at least 1", ValueError)
        self._channel = _Channel(group, dist.get_rank(group), device)
        self._buckets = (_Bucket(bucket_bytes, device), _Bucket(bucket_bytes, device))
        self._layouts: dict[int, bytes] = {}
        """Layouts of the buckets, as the receivers know them."""

    def send(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Send weights; when it returns, they need not be kept.

        If the iterable fails, the receivers are notified, and its error is raised here. `PeerLostError` if a receiver
        is gone, or did not receive in time.
        """
        try:
            for number, bucket in enumerate(self._filled(weights)):
                layout = json.dumps(to_json(bucket.layout)).encode()
                is_known = self._layouts.get(number) == layout
                self._channel.send(_BUCKET, version, b"" if is_known else layout, bucket.size_bytes)
                self._layouts[number] = layout
                if bucket.size_bytes:
                    bucket.sending = self._channel.start(bucket.buffer(0)[: bucket.size_bytes])
        except PeerLostError:
            raise
        except BaseException as error:
            self._channel.send(_FAILED, version, f"{type(error).__name__}: {error}".encode())
            raise
        self._channel.send(_END, version)
        for bucket in self._buckets:
            bucket.emptied()

    def _filled(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator["_Bucket"]:
        """Yield one full bucket after the other, and clear the next one once its previous contents have been sent."""
        buckets = cycle(self._buckets)
        bucket = next(buckets).emptied()
        for name, tensor in weights:
            if not bucket.fits(tensor):
                yield bucket
                bucket = next(buckets).emptied()
            bucket.add(name, tensor)
            if bucket.is_full:
                yield bucket
                bucket = next(buckets).emptied()
        if bucket.layout:
            yield bucket


class WeightReceiver:
    """A rank that gets the weights.

    Args:
        group: see `WeightSender`.
        src: the sender's rank in this group.
        device: of the received tensors.
        reuse_buffer: each bucket is received in the same memory: a tensor is valid until the next one is requested.
            For consumers that copy each tensor (`WeightMirror`, the shared memory of an `EngineProcess`), not for those
            that collect first (``dict(...)``, `HFEngine`, `VLLMEngine`).
    """

    def __init__(self, group: dist.ProcessGroup, *, src: int, device: str = "cpu", reuse_buffer: bool = False) -> None:
        if src == dist.get_rank(group):
            raise ValueError(f"src is {src}, which is this rank; expected another one")
        self._channel = _Channel(group, src, device)
        self._reuse_buffer = reuse_buffer
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._layouts: dict[int, Layout] = {}
        self._buckets: Iterator[tuple[torch.Tensor, Layout]] = iter(())
        """The rest of the current weights."""
        self._tensors = _unpacked(self._buckets)

    def receive(self) -> FullWeights:
        """Wait for the next weights; they come while they are iterated over, once.

        That blocks: collect them in a thread while an event loop generates. The rest is received and dropped when the
        iterator is closed, or at the next call, because the other ranks wait for this one.

        If the sender fails half-way, the iterator raises `WeightSyncError`, so an engine that collects first keeps its
        old weights. `PeerLostError`, here or from the iterator, if the sender is gone, or did not send in time.
        """
        self._tensors.close()
        _drop(self._buckets)
        message = self._channel.receive()
        self._buckets = self._received(message)
        self._tensors = _unpacked(self._buckets)
        return FullWeights(version=message.version, tensors=self._tensors)

    def _received(self, message: "_Message") -> Iterator[tuple[torch.Tensor, Layout]]:
        """Receive buckets, of which this message is the first one's."""
        for number in count():
            if message.kind == _FAILED:
                raise WeightSyncError(f"the sender of version {message.version} failed: {message.text.decode()}")
            if message.kind == _END:
                return
            if message.text:
                self._layouts[number] = from_json(json.loads(message.text))
            if not self._reuse_buffer or self._buffer.numel() < message.buffer_bytes:
                self._buffer = self._buffer.new_empty(message.buffer_bytes)
            buffer = self._buffer[: message.buffer_bytes]
            if message.buffer_bytes:
                self._channel.run(buffer)
            yield buffer, self._layouts[number]
            message = self._channel.receive()


def _unpacked(buckets: Iterator[tuple[torch.Tensor, Layout]]) -> Generator[tuple[str, torch.Tensor]]:
    try:
        for buffer, layout in buckets:
            yield from unpacked(buffer, layout)
    finally:
        _drop(buckets)


def _drop(buckets: Iterator[object]) -> None:
    with suppress(WeightSyncError):  # of weights that are not wanted
        for _ in buckets:
            pass


class _Bucket(PackedTensors):
    """A buffer that is filled with tensors and then sent."""

    def __init__(self, limit_bytes: int, device: str) -> None:
        super().__init__()
        self._limit_bytes = limit_bytes
        self._buffer = torch.empty(limit_bytes, dtype=torch.uint8, device=device)
        self.sending: Any = None

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether there is capacity for a tensor; an empty bucket takes any."""
        return not self.layout or aligned(self.size_bytes) + tensor.nbytes <= self._limit_bytes

    @property
    def is_full(self) -> bool:
        return self.size_bytes >= self._limit_bytes

    def buffer(self, size_bytes: int) -> torch.Tensor:
        if size_bytes > self._buffer.numel():  # for the first tensor alone, so there is nothing to keep
            self._buffer = self._buffer.new_empty(size_bytes)
        return self._buffer

    def emptied(self) -> "_Bucket":
        """Return the empty bucket, once its tensors have been sent."""
        with _losses():
            if self.sending is not None:
                self.sending.wait()
        self.sending, self.layout, self.size_bytes = None, {}, 0
        return self


class _Message(NamedTuple):
    kind: int
    version: int
    text: bytes
    buffer_bytes: int


class _Channel:
    """Broadcasts from one rank of a group."""

    def __init__(self, group: dist.ProcessGroup, src: int, device: str) -> None:
        self._group = group
        self._src = src
        self._device = device

    def start(self, tensor: torch.Tensor, *, async_op: bool = True) -> Any:
        with _losses():
            return dist.broadcast(tensor, group=self._group, group_src=self._src, async_op=async_op)

    def run(self, tensor: torch.Tensor) -> torch.Tensor:
        self.start(tensor, async_op=False)
        return tensor

    def send(self, kind: int, version: int, text: bytes = b"", buffer_bytes: int = 0) -> None:
        self.run(torch.tensor([kind, version, len(text), buffer_bytes], dtype=torch.int64, device=self._device))
        if text:
            self.run(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device))

    def receive(self) -> _Message:
        header = self.run(torch.empty(4, dtype=torch.int64, device=self._device))
        kind, version, text_bytes, buffer_bytes = header.tolist()
        text = b""
        if text_bytes:
            text = self.run(torch.empty(text_bytes, dtype=torch.uint8, device=self._device)).cpu().numpy().tobytes()
        return _Message(kind, version, text, buffer_bytes)


@contextmanager
def _losses() -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"a rank is gone, or did not take part in time: {error}") from error
