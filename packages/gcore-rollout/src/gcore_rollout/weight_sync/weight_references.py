"""Named tensors as objects of Ray, passed as references: in its object store, or where they are, read from there."""

import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self
from zlib import crc32

import torch

from gcore_rollout.errors import EngineDiedError, make_extra_error, require
from gcore_rollout.weight_sync.digests import Digest, Digests, digests_of
from gcore_rollout.weight_sync.layout import (
    Layout,
    Packing,
    TensorSpec,
    align,
    group_into_buckets,
    layout_of,
    unpack,
)
from gcore_rollout.weight_sync.shared_weights import allocate_shareable
from gcore_rollout.weight_sync.staging import stage

# In a program started by `uv run`, Ray would build its environment again for every process. Read on import.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

try:
    import ray
    from ray.exceptions import RayError
    from ray.experimental import set_target_device_for_ref
except ImportError as error:
    raise make_extra_error("ray", "ray") from error


_pools: dict[torch.device, Any] = {}
"""Memory of the GPUs for weights that others read from there; later weights use it again."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    """Some tensors in one object of Ray."""

    reference: Any
    layout: Layout
    node: str
    """The id of the node that it was put on."""
    is_direct: bool = False
    """The object is a buffer on the tensors' device, read from there; otherwise it is their bytes in the store."""


class WeightReferences:
    """One model's weights as objects of Ray, pickled as references to them; made by `put`.

    Iterating yields (name, tensor), so it can be given to `update_weights` of any engine. A tensor may be the store's
    own memory and must not be written to. The memory is freed with the last reference and tensor, or, except for
    tensors in use, when the process that put it ends.

    Example:
        >>> def publish(weights: Iterable[tuple[str, torch.Tensor]], parts: list[WeightReferences]) -> WeightReferences:
        ...     return WeightReferences.join([WeightReferences.put(weights), *parts])
        >>> weights = [("head", torch.empty(3, device="meta"))]  # Tensors on other devices need a Ray cluster.
        >>> dict(publish(weights, []))
        {}
    """

    is_whole = True
    num_writes = 1
    next_base = None
    """See `WeightHistory`: all weights are whole."""

    def __init__(
        self, buckets: Sequence[_Bucket], *, digests: Digests | None = None, on_host: bool = False
    ) -> None:
        self._buckets = tuple(buckets)
        self._on_host = on_host
        self.digests = digests or {}
        """Digests that the weights came with; empty if there were none."""

    @classmethod
    def put(
        cls,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        bucket_size_bytes: int = 256 << 20,
        is_direct: bool = False,
    ) -> Self:
        """Copy weights into the store of this node, or within their device.

        Args:
            weights: never asked for more than a bucket ahead; they must not write over those that they gave. Those on
                the meta device are put by another rank (`divide_weights`), and left out here.
            bucket_size_bytes: size of an object; a larger tensor is one of its own.
            is_direct: copy them on their device, from which each receiver reads them by NIXL: by RDMA, over NVLink, or
                by TCP. Every process needs the package ``nixl``. Buckets for which the device lacks memory are put into
                the store.
        """
        require(
            "bucket_size_bytes", bucket_size_bytes, bucket_size_bytes >= 1, "at least 1", ValueError
        )
        here = ((name, tensor.detach()) for name, tensor in weights if not tensor.is_meta)
        groups = group_into_buckets(here, bucket_size_bytes)
        # In a loop, its variable would hold a bucket while the next one is filled.
        buckets = map(_put_direct, groups) if is_direct else map(_put_bucket, stage(groups))
        return cls(list(buckets), digests=digests_of(weights))

    @classmethod
    def join(cls, parts: Iterable[Self]) -> Self:
        """Return the weights of which each of several processes has put a part."""
        buckets: list[_Bucket] = []
        digests: dict[str, Mapping[str, Digest]] = {}
        for part in parts:
            buckets += part._buckets
            digests.update(part.digests)
        return cls(buckets, digests=digests)

    def after(self, before: Self | None) -> Self:
        """Return these weights: they need none from before."""
        del before
        return self

    @property
    def layout(self) -> Layout:
        """The specs of all tensors, also of those that are not on this node yet."""
        layout: dict[str, TensorSpec] = {}
        for bucket in self._buckets:
            layout.update(bucket.layout)
        return layout

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.layout.values())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors; while a bucket is read, the next one is fetched to this node, and no other.

        Raises:
            EngineDiedError: a bucket is lost: an engine that has read others has a part of the new weights.
        """
        with ThreadPoolExecutor(1) as thread:
            fetches = (thread.submit(self._fetch_bucket, bucket) for bucket in self._buckets)
            ahead = next(fetches, None)
            for number, bucket in enumerate(self._buckets, start=1):
                assert ahead is not None
                try:
                    parts = ahead.result()
                except RayError as error:
                    raise EngineDiedError(
                        f"bucket {number} of {len(self._buckets)} of the new weights is lost: {error}"
                    ) from error
                ahead = next(fetches, None)
                yield from _tensors_of(parts, bucket)
                # Not while the next one is waited for.
                del parts

    def _fetch_bucket(self, bucket: _Bucket) -> list[Any]:
        if bucket.is_direct and self._on_host:
            set_target_device_for_ref(bucket.reference, "cpu")
        return ray.get(bucket.reference)

    async def fetch(self, *, on_host: bool = False) -> Self:
        """Return these weights once their first bucket is on this node, or ready to be read from where it is.

        They begin with those that were put here, so that nodes do not all fetch from the same one at a time.

        Args:
            on_host: tensors are to be in the host's memory, also those that are read from a GPU.
        """
        if not self._buckets:
            return self
        here = ray.get_runtime_context().get_node_id()
        nodes = [bucket.node for bucket in self._buckets]
        start = crc32(here.encode()) % len(nodes)
        if here in nodes:
            start = nodes.index(here)
        buckets = self._buckets[start:] + self._buckets[:start]
        if not buckets[0].is_direct:
            await buckets[0].reference
        return type(self)(buckets, digests=self.digests, on_host=on_host)

    def reading(self) -> AbstractContextManager[None]:
        """Do nothing: the weights are never overwritten."""
        return nullcontext()


def _put_bucket(weights: Mapping[str, torch.Tensor]) -> _Bucket:
    """Copy tensors to the store."""
    arrays = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in weights.values()]
    return _Bucket(reference=ray.put(arrays), layout=layout_of(weights), node=_this_node())


def _put_direct(weights: Mapping[str, torch.Tensor]) -> _Bucket:
    """Copy tensors on their device."""
    [device] = {tensor.device for tensor in weights.values()}
    size_bytes = sum(align(tensor.nbytes) for tensor in weights.values())
    try:
        packing = Packing(allocate_shareable(size_bytes, device, _pools))
    except torch.OutOfMemoryError as error:
        _logger.warning("%d bytes of weights go through the object store: %s", size_bytes, error)
        [in_host] = stage([weights])
        return _put_bucket(in_host)
    for name, tensor in weights.items():
        packing.add(name, tensor)
    reference = ray.put([packing.buffer()], _tensor_transport="nixl")
    return _Bucket(reference=reference, layout=packing.layout, node=_this_node(), is_direct=True)


def _this_node() -> str:
    return ray.get_runtime_context().get_node_id()


def _tensors_of(parts: Sequence[Any], bucket: _Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    if bucket.is_direct:
        [buffer] = parts
        yield from unpack(buffer, bucket.layout)
        return
    for (name, spec), array in zip(bucket.layout.items(), parts, strict=True):
        with warnings.catch_warnings():
            # The store's memory is read-only: a write must fail and not change the weights of others.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
            flat = torch.from_numpy(array)
        yield name, spec.view(flat)
