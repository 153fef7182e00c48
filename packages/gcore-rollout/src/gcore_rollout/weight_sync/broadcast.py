"""Broadcast of weights from one rank of a torch.distributed process group: NCCL between GPUs, gloo between hosts.

Tensors are sent in buckets, one flat buffer each. Every bucket follows a header of four integers: the kind of message,
the version, and the sizes of the bucket's layout and of its buffer. The layout (names, shapes, data types) is sent only
if it differs from that of the same bucket the last time.
"""

import json
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gcore_rollout.errors import PeerLostError, WeightSyncError
from gcore_rollout.weight_sync.layout import TensorSpec, aligned

_BUCKET, _END, _FAILED = 0, 1, 2
_IN_FLIGHT = 2

BucketLayout = tuple[tuple[str, TensorSpec], ...]


class WeightSender:
    """The rank that has the weights.

    Two buckets are in flight: while one is sent, the next is filled with what the iterable makes.

    Args:
        group: of the sender and its receivers, all of which make their calls in the same order. How long a rank waits
            for another that is silent is the group's timeout.
        device: of the buffers; the group's backend must be able to send from it.
        bucket_bytes: size of a buffer; a larger tensor has one of its own.
    """

    def __init__(self, group: dist.ProcessGroup, *, device: str = "cpu", bucket_bytes: int = 256 << 20) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {bucket_bytes}; expected at least 1")
        self._channel = _Channel(group, dist.get_rank(group), device)
        self._buckets = [_Bucket(bucket_bytes, device) for _ in range(_IN_FLIGHT)]
        self._layouts: dict[int, BucketLayout] = {}
        """Layouts of the buckets, as the receivers know them."""
        self._number = 0

    def send(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Send weights; when it returns, they need not be kept.

        If the iterable fails, the receivers are notified, and its error is raised here.

        Raises:
            PeerLostError: a receiver is gone, or did not receive in time.
        """
        self._number = 0
        bucket = self._emptied()
        try:
            for name, tensor in weights:
                if not bucket.fits(tensor):
                    bucket = self._sent(bucket, version)
                bucket.add(name, tensor)
                if bucket.is_full:
                    bucket = self._sent(bucket, version)
            if bucket.layout:
                self._sent(bucket, version)
        except PeerLostError:
            raise
        except BaseException as error:
            self._channel.send(_FAILED, version, f"{type(error).__name__}: {error}".encode())
            raise
        self._channel.send(_END, version)
        for bucket in self._buckets:
            bucket.clear()

    def _sent(self, bucket: "_Bucket", version: int) -> "_Bucket":
        """Start sending a bucket, and return the one to fill meanwhile."""
        layout = tuple(bucket.layout)
        is_known = self._layouts.get(self._number) == layout
        text = b"" if is_known else json.dumps([(name, *spec.plain()) for name, spec in layout]).encode()
        self._channel.send(_BUCKET, version, text, bucket.used_bytes)
        self._layouts[self._number] = layout
        if bucket.used_bytes:
            bucket.sending = self._channel.start(bucket.buffer[: bucket.used_bytes])
        self._number += 1
        return self._emptied()

    def _emptied(self) -> "_Bucket":
        """Return the next bucket once its previous contents have been sent."""
        bucket = self._buckets[self._number % _IN_FLIGHT]
        bucket.clear()
        return bucket


@dataclass(frozen=True, kw_only=True)
class IncomingWeights:
    """Incoming weights, to be iterated over once."""

    version: int
    tensors: Iterator[tuple[str, torch.Tensor]]


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
        self._layouts: dict[int, BucketLayout] = {}
        self._incoming: Generator[tuple[str, torch.Tensor]] | None = None
        self._is_coming = False
        """Whether more messages belong to these weights."""
        self._message: _Message | None = None
        """The next message, if it has been received already."""
        self._number = 0

    def receive(self) -> IncomingWeights:
        """Wait for the next weights; they come while they are iterated over.

        That blocks: collect them in a thread while an event loop generates. The rest is received and dropped when the
        iterator is closed, or at the next call, because the other ranks wait for this one.

        If the sender fails half-way, the iterator raises, so an engine that collects first keeps its old weights.

        Raises:
            PeerLostError: the sender is gone, or did not send in time; here or from the iterator.
            WeightSyncError: the sender failed; from the iterator.
        """
        if self._incoming is not None:
            self._incoming.close()
        self._drop_rest()
        self._message = self._channel.receive()
        self._number, self._is_coming = 0, True
        self._incoming = self._tensors()
        return IncomingWeights(version=self._message.version, tensors=self._incoming)

    def _tensors(self) -> Generator[tuple[str, torch.Tensor]]:
        try:
            while (bucket := self._next_bucket()) is not None:
                buffer, layout = bucket
                end = 0
                for name, spec in layout:
                    start = aligned(end)
                    end = start + spec.size_bytes
                    yield name, spec.view(buffer, start)
        finally:
            self._drop_rest()

    def _drop_rest(self) -> None:
        with suppress(WeightSyncError):  # of weights that are not wanted
            while self._next_bucket() is not None:
                pass

    def _next_bucket(self) -> tuple[torch.Tensor, BucketLayout] | None:
        """Receive the next bucket; None: there are no more."""
        if not self._is_coming:
            return None
        # Unless all goes well from here on, there is no more to come.
        self._is_coming = False
        message, self._message = self._message or self._channel.receive(), None
        if message.kind == _FAILED:
            raise WeightSyncError(f"the sender of version {message.version} failed: {message.text.decode()}")
        if message.kind == _END:
            return None
        if message.text:
            rows = json.loads(message.text)
            self._layouts[self._number] = tuple((name, TensorSpec.from_plain(*spec)) for name, *spec in rows)
        if not self._reuse_buffer or self._buffer.numel() < message.buffer_bytes:
            self._buffer = self._buffer.new_empty(message.buffer_bytes)
        buffer = self._buffer[: message.buffer_bytes]
        if message.buffer_bytes:
            self._channel.run(buffer)
        layout = self._layouts[self._number]
        self._number += 1
        self._is_coming = True
        return buffer, layout


class _Bucket:
    """A flat buffer and the tensors in it."""

    def __init__(self, size_bytes: int, device: str) -> None:
        self._size_bytes = size_bytes
        self.buffer = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.layout: list[tuple[str, TensorSpec]] = []
        self.used_bytes = 0
        self.sending: Any = None

    def fits(self, tensor: torch.Tensor) -> bool:
        """Return whether there is capacity for a tensor; an empty bucket takes any."""
        return not self.layout or aligned(self.used_bytes) + tensor.nbytes <= self._size_bytes

    @property
    def is_full(self) -> bool:
        return self.used_bytes >= self._size_bytes

    def add(self, name: str, tensor: torch.Tensor) -> None:
        start = aligned(self.used_bytes)
        self.used_bytes = start + tensor.nbytes
        if self.used_bytes > self.buffer.numel():
            self.buffer = self.buffer.new_empty(self.used_bytes)
        spec = TensorSpec.of(tensor)
        spec.view(self.buffer, start).copy_(tensor.detach())
        self.layout.append((name, spec))

    def clear(self) -> None:
        if self.sending is not None:
            with _losses():
                self.sending.wait()
        self.sending = None
        self.layout, self.used_bytes = [], 0


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

    def start(self, tensor: torch.Tensor) -> Any:
        with _losses():
            return dist.broadcast(tensor, group=self._group, group_src=self._src, async_op=True)

    def run(self, tensor: torch.Tensor) -> torch.Tensor:
        work = self.start(tensor)
        with _losses():
            work.wait()
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
