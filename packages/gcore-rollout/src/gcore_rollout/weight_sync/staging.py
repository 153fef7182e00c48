"""Weights on their way from a CUDA device to the host, by way of two pinned buckets."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from gcore_rollout.engines.host_weights import HostBlock

_Bucket = Mapping[str, torch.Tensor]
_blocks = [HostBlock(0), HostBlock(0)]
"""The memory of the buckets, kept for later updates: pinning takes time."""


def stage(buckets: Iterable[_Bucket], *, device_type: str = "cuda") -> Iterator[_Bucket]:
    """Yield buckets in the host's memory, in their order: while one is read, the device copies the next one.

    Tensors are valid until the next bucket is requested. Buckets without tensors of the device are yielded as they are.
    """
    module: Any = torch.get_device_module(device_type)
    copied: deque[tuple[Sequence[Any], _Bucket]] = deque()
    number = 0
    for bucket in buckets:
        number = 1 - number
        copies = bucket
        events: list[Any] = []
        devices = {tensor.device for tensor in bucket.values() if tensor.device.type == device_type}
        if devices:
            copies = _copy(bucket, number, is_pinned=device_type == "cuda")
        for device in devices:
            events.append(module.Event())
            events[-1].record(module.current_stream(device))
        copied.append((events, copies))
        # They would hold tensors while the next bucket is filled.
        del bucket, copies
        while len(copied) > bool(events):
            yield _wait(*copied.popleft())
    while copied:
        yield _wait(*copied.popleft())


def stage_each(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield weights in the host's memory, each in a bucket of its own."""
    for bucket in stage({name: tensor} for name, tensor in weights):
        yield from bucket.items()


def _copy(bucket: _Bucket, number: int, *, is_pinned: bool) -> _Bucket:
    size_bytes = HostBlock.size_of(bucket.values())
    if len(_blocks[number]) < size_bytes:
        _blocks[number] = HostBlock(size_bytes, is_pinned=is_pinned)
    copies = dict(zip(bucket, _blocks[number].split(bucket.values()), strict=True))
    for name, copy in copies.items():
        copy.copy_(bucket[name].detach(), non_blocking=True)
    return copies


def _wait(events: Sequence[Any], copies: _Bucket) -> _Bucket:
    for event in events:
        event.synchronize()
    return copies
