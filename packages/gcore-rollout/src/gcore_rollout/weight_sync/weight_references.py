"""Named tensors in Ray's object store, passed as references and read in place."""

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self
from zlib import crc32

import torch

from gcore_rollout.errors import EngineDiedError, make_extra_error, require
from gcore_rollout.weight_sync.digests import Digest, Digests, digests_of
from gcore_rollout.weight_sync.layout import Layout, TensorSpec, group_into_buckets, layout_of
from gcore_rollout.weight_sync.staging import stage

# In a program started by `uv run`, Ray would build its environment again for every process. Read on import.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

try:
    import ray
    from ray.exceptions import RayError
except ImportError as error:
    raise make_extra_error("ray", "ray") from error


_Bucket = tuple[Any, Layout, str]
"""A reference to an object of the store, which has the bytes of each of some tensors as an array, their layout, and the
id of the node that it was put on."""


class WeightReferences:
    """One model's weights in Ray's object store, pickled as references to them; made by `put`.

    Iterating yields (name, tensor), so it can be given to `update_weights` of any engine. A tensor is the store's own
    memory and must not be written to. The memory is freed with the last reference and tensor, or, except for tensors in
    use, when the process that put it ends.

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

    def __init__(self, buckets: Sequence[_Bucket], *, digests: Digests | None = None) -> None:
        self._buckets = tuple(buckets)
        self.digests = digests or {}
        """Digests that the weights came with; empty if there were none."""

    @classmethod
    def put(
        cls, weights: Iterable[tuple[str, torch.Tensor]], *, bucket_size_bytes: int = 256 << 20
    ) -> Self:
        """Copy weights into the store of this node.

        Args:
            weights: never asked for more than a bucket ahead; they must not write over those that they gave. Those on
                the meta device are put by another rank (`divide_weights`), and left out here.
            bucket_size_bytes: size of an object of the store; a larger tensor is one of its own.
        """
        require(
            "bucket_size_bytes", bucket_size_bytes, bucket_size_bytes >= 1, "at least 1", ValueError
        )
        here = ((name, tensor.detach()) for name, tensor in weights if not tensor.is_meta)
        # In a loop, its variable would hold a bucket while the next one is filled.
        buckets = list(map(_put_bucket, stage(group_into_buckets(here, bucket_size_bytes))))
        return cls(buckets, digests=digests_of(weights))

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
        for _, specs, _ in self._buckets:
            layout.update(specs)
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
        fetches: Iterator[Future[list[Any]]] = (bucket[0].future() for bucket in self._buckets)
        ahead = next(fetches, None)
        for number, (_, layout, _) in enumerate(self._buckets, start=1):
            assert ahead is not None
            try:
                arrays = ahead.result()
            except RayError as error:
                raise EngineDiedError(
                    f"bucket {number} of {len(self._buckets)} of the new weights is lost: {error}"
                ) from error
            ahead = next(fetches, None)
            yield from _tensors_of(arrays, layout)
            # Not while the next one is waited for.
            del arrays

    async def fetch(self) -> Self:
        """Return these weights once their first bucket is on this node.

        They begin with those that were put here, so that nodes do not all fetch from the same one at a time.
        """
        if not self._buckets:
            return self
        here = ray.get_runtime_context().get_node_id()
        nodes = [node for _, _, node in self._buckets]
        start = crc32(here.encode()) % len(nodes)
        if here in nodes:
            start = nodes.index(here)
        buckets = self._buckets[start:] + self._buckets[:start]
        await buckets[0][0]
        return type(self)(buckets, digests=self.digests)

    def reading(self) -> AbstractContextManager[None]:
        """Do nothing: the weights are never overwritten."""
        return nullcontext()


def _put_bucket(weights: Mapping[str, torch.Tensor]) -> _Bucket:
    """Copy tensors to the store."""
    arrays = [tensor.reshape(-1).view(torch.uint8).numpy() for tensor in weights.values()]
    return ray.put(arrays), layout_of(weights), ray.get_runtime_context().get_node_id()


def _tensors_of(arrays: Sequence[Any], layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    for (name, spec), array in zip(layout.items(), arrays, strict=True):
        with warnings.catch_warnings():
            # The store's memory is read-only: a write must fail and not change the weights of others.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
            flat = torch.from_numpy(array)
        yield name, spec.view(flat)
