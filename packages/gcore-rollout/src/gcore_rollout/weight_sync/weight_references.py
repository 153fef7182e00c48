"""Named tensors in Ray's object store, passed as references and read in place."""

import asyncio
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch

from gcore_rollout.errors import make_extra_error, require
from gcore_rollout.weight_sync.digests import Digest, Digests, digests_of
from gcore_rollout.weight_sync.layout import Layout, group_into_buckets, layout_of

# In a program started by `uv run`, Ray would build its environment again for every process. Read on import.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

try:
    import ray
except ImportError as error:
    raise make_extra_error("ray", "ray") from error


_Bucket = tuple[Any, Layout]
"""A reference to an object of the store, which has the bytes of each of some tensors as an array, and their layout."""


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
        buckets = list(map(_put_bucket, group_into_buckets(here, bucket_size_bytes)))
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

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for reference, layout in self._buckets:
            yield from _tensors_of(ray.get(reference), layout)

    async def fetch(self) -> list[tuple[str, torch.Tensor]]:
        """Return all weights once they are on this node."""
        contents = await asyncio.gather(*(reference for reference, _ in self._buckets))
        tensors: list[tuple[str, torch.Tensor]] = []
        for (_, layout), arrays in zip(self._buckets, contents, strict=True):
            tensors += _tensors_of(arrays, layout)
        return tensors

    def reading(self) -> AbstractContextManager[None]:
        """Do nothing: the weights are never overwritten."""
        return nullcontext()


def _put_bucket(weights: Mapping[str, torch.Tensor]) -> _Bucket:
    """Copy tensors to the store, by way of this process's memory only if they are not on the CPU."""
    arrays = [tensor.cpu().reshape(-1).view(torch.uint8).numpy() for tensor in weights.values()]
    return ray.put(arrays), layout_of(weights)


def _tensors_of(arrays: Sequence[Any], layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    for (name, spec), array in zip(layout.items(), arrays, strict=True):
        with warnings.catch_warnings():
            # The store's memory is read-only: a write must fail and not change the weights of others.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
            flat = torch.from_numpy(array)
        yield name, spec.view(flat)
