"""Weights from one rank of a torch.distributed process group to all others: NCCL between GPUs, gloo between hosts.

Tensors travel in buckets, one flat buffer each. Before every bucket goes a header of four integers: what follows, the
version, and the sizes of the bucket's layout and of its buffer. The layout (names, shapes, data types) is sent only if
it is not the one of the same bucket the last time.
"""

import json
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gcore_rollout.errors import PeerLostError, WeightSyncError
from gcore_rollout.weight_sync.layout import TensorSpec

_ALIGNMENT_BYTES = 64
_BUCKET, _END, _FAILED = 0, 1, 2
_HEADER_LENGTH = 4
_IN_FLIGHT = 2

BucketLayout = tuple[tuple[str, TensorSpec], ...]


class WeightSender:
    """The rank that has the weights.

    Two buckets are in flight: while one is sent, the next is filled with what the iterable makes.

    Args:
        group: of the sender and its receivers, all of which make their calls in the same order. How long a rank waits
            for another that is silent is the group's timeout.
        device: where buffers are; one that the group's backend can send from.
        bucket_bytes: of a buffer; a larger tensor has one of its own.
    """

    def __init__(self, group: dist.ProcessGroup, *, device: str = "cpu", bucket_bytes: int = 256 << 20) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {bucket_bytes}; expected at least 1")
        self._channel = _Channel(group, src=dist.get_rank(group), device=device)
        self._buckets = [_Bucket(bucket_bytes, device) for _ in range(_IN_FLIGHT)]
        self._layouts: dict[int, BucketLayout] = {}
        """Of the buckets, as the receivers know them."""

    def send(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Send weights; when it returns, they need not be kept.

        If the iterable fails, the receivers are told, and its error is raised here.

        Raises:
            PeerLostError: a receiver is gone, or did not receive in time.
        """
        number = 0
        bucket = self._emptied(number)
        try:
            for name, tensor in weights:
                if not bucket.has_room_for(tensor):
                    bucket = self._sent(number, bucket, version)
                    number += 1
                bucket.add(name, tensor)
                if bucket.is_full:
                    bucket = self._sent(number, bucket, version)
                    number += 1
            if bucket.layout:
                self._sent(number, bucket, version)
        except PeerLostError:
            raise
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}".encode()
            self._channel.send_header(_FAILED, version, len(reason), 0)
            self._channel.send_text(reason)
            raise
        self._channel.send_header(_END, version, 0, 0)
        for bucket in self._buckets:
            bucket.clear()

    def _sent(self, number: int, bucket: "_Bucket", version: int) -> "_Bucket":
        """Begin to send a bucket, and return the one to fill meanwhile."""
        layout = tuple(bucket.layout)
        is_known = self._layouts.get(number) == layout
        text = b"" if is_known else json.dumps([(name, *spec.plain()) for name, spec in layout]).encode()
        self._channel.send_header(_BUCKET, version, len(text), bucket.used_bytes)
        if not is_known:
            self._layouts[number] = layout
            self._channel.send_text(text)
        if bucket.used_bytes:
            bucket.sending = self._channel.start(bucket.buffer[: bucket.used_bytes])
        return self._emptied(number + 1)

    def _emptied(self, number: int) -> "_Bucket":
        """The bucket that is used for this one in turn, once what was in it has been sent."""
        bucket = self._buckets[number % _IN_FLIGHT]
        bucket.clear()
        return bucket


@dataclass(frozen=True, kw_only=True)
class IncomingWeights:
    """Weights on their way, to be iterated over once."""

    version: int
    tensors: Iterator[tuple[str, torch.Tensor]]


class WeightReceiver:
    """A rank that gets the weights.

    Args:
        group: see `WeightSender`.
        src: the sender's rank in this group.
        device: where tensors are to be.
        reuse_buffer: each bucket is received in the same memory: a tensor is valid until the next one is asked for.
            Good for what copies as it goes (`WeightMirror`, the shared memory of an `EngineProcess`), not for what
            collects first (``dict(...)``, `HFEngine`, `VLLMEngine`).
    """

    def __init__(self, group: dist.ProcessGroup, *, src: int, device: str = "cpu", reuse_buffer: bool = False) -> None:
        if src == dist.get_rank(group):
            raise ValueError(f"src is {src}, which is this rank: another one has to send")
        self._channel = _Channel(group, src=src, device=device)
        self._device = device
        self._reuse_buffer = reuse_buffer
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._layouts: dict[int, BucketLayout] = {}
        self._incoming: Generator[tuple[str, torch.Tensor]] | None = None
        self._is_coming = False
        """There are messages that belong to these weights."""
        self._header: list[int] = []
        """What was received already of the message that comes next."""
        self._number = 0
        """Of the bucket that comes next."""

    def receive(self) -> IncomingWeights:
        """Wait for the next weights; they come while they are iterated over.

        That blocks: where an event loop generates meanwhile, let a thread collect them. What is not iterated over is
        received and dropped when the iterator is closed, or at the next call, for the others wait for this rank.

        If the sender fails half-way, the iterator raises, so an engine that collects first keeps its old weights.

        Raises:
            PeerLostError: the sender is gone, or did not send in time; here or from the iterator.
            WeightSyncError: the sender failed; from the iterator.
        """
        if self._incoming is not None:
            self._incoming.close()
        self._drop_rest()
        self._header = self._channel.receive_header()
        self._number, self._is_coming = 0, True
        self._incoming = self._tensors()
        return IncomingWeights(version=self._header[1], tensors=self._incoming)

    def _tensors(self) -> Generator[tuple[str, torch.Tensor]]:
        try:
            while (bucket := self._next_bucket()) is not None:
                yield from _views(*bucket)
        finally:
            self._drop_rest()

    def _drop_rest(self) -> None:
        with suppress(WeightSyncError):  # of weights that nobody wants
            while self._next_bucket() is not None:
                pass

    def _next_bucket(self) -> tuple[torch.Tensor, BucketLayout] | None:
        """None: there are no more."""
        if not self._is_coming:
            return None
        # Unless all goes well from here on, there is no more to come.
        self._is_coming = False
        kind, version, text_bytes, buffer_bytes = self._header or self._channel.receive_header()
        self._header = []
        if kind == _FAILED:
            reason = self._channel.receive_text(text_bytes).decode()
            raise WeightSyncError(f"the sender of version {version} failed: {reason}")
        if kind == _END:
            return None
        if text_bytes:
            rows = json.loads(self._channel.receive_text(text_bytes))
            self._layouts[self._number] = tuple((name, TensorSpec.from_plain(*spec)) for name, *spec in rows)
        if not self._reuse_buffer or self._buffer.numel() < buffer_bytes:
            self._buffer = torch.empty(buffer_bytes, dtype=torch.uint8, device=self._device)
        buffer = self._buffer[:buffer_bytes]
        if buffer_bytes:
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
        self.sending: _Work | None = None

    def has_room_for(self, tensor: torch.Tensor) -> bool:
        """An empty one takes whatever comes."""
        return not self.layout or _aligned(self.used_bytes) + tensor.nbytes <= self._size_bytes

    @property
    def is_full(self) -> bool:
        return self.used_bytes >= self._size_bytes

    def add(self, name: str, tensor: torch.Tensor) -> None:
        start = _aligned(self.used_bytes)
        end = start + tensor.nbytes
        if end > self.buffer.numel():
            self.buffer = torch.empty(end, dtype=torch.uint8, device=self.buffer.device)
        spec = TensorSpec.of(tensor)
        _view(self.buffer, start, spec).copy_(tensor.detach())
        self.layout.append((name, spec))
        self.used_bytes = end

    def clear(self) -> None:
        """Once it has been sent."""
        if self.sending is not None:
            self.sending.wait()
        self.sending = None
        self.layout, self.used_bytes = [], 0


class _Channel:
    """Broadcasts from one rank of a group."""

    def __init__(self, group: dist.ProcessGroup, *, src: int, device: str) -> None:
        self._group = group
        self._src = src
        self._device = device

    def start(self, tensor: torch.Tensor) -> "_Work":
        try:
            return _Work(dist.broadcast(tensor, group=self._group, group_src=self._src, async_op=True))
        except RuntimeError as error:
            raise _lost(error) from error

    def run(self, tensor: torch.Tensor) -> None:
        self.start(tensor).wait()

    def send_header(self, *header: int) -> None:
        self.run(torch.tensor(header, dtype=torch.int64, device=self._device))

    def receive_header(self) -> list[int]:
        header = torch.empty(_HEADER_LENGTH, dtype=torch.int64, device=self._device)
        self.run(header)
        return header.tolist()

    def send_text(self, text: bytes) -> None:
        self.run(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device))

    def receive_text(self, size_bytes: int) -> bytes:
        text = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
        self.run(text)
        return text.cpu().numpy().tobytes()


class _Work:
    """A broadcast on its way."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _lost(error) from error


def _lost(error: RuntimeError) -> PeerLostError:
    return PeerLostError(f"a rank is gone, or did not do its part in time: {error}")


def _views(buffer: torch.Tensor, layout: BucketLayout) -> Iterator[tuple[str, torch.Tensor]]:
    end = 0
    for name, spec in layout:
        start = _aligned(end)
        end = start + spec.size_bytes
        yield name, _view(buffer, start, spec)


def _view(buffer: torch.Tensor, start: int, spec: TensorSpec) -> torch.Tensor:
    return buffer[start : start + spec.size_bytes].view(spec.dtype).view(spec.shape)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
