"""Weights sent as their changes since those before, through Ray's object store, as far as they are sparse or low-rank.

Each rank compares the tensors that it sends with a copy of what it sent last. An engine keeps a copy of all tensors
(`WeightMirror`), to which it applies the changes. A history begins with whole tensors, so that an engine which has just
started can follow, too. Of weights with adapters (`UnmergedWeights`) these are the frozen ones; then the adapters alone
are sent, and merged by the engine's node.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from gcore_rollout.weight_sync.digests import Digest, Digests, UnmergedWeights, digests_of
from gcore_rollout.weight_sync.layout import Layout, TensorSpec, host_copy, layout_of
from gcore_rollout.weight_sync.updates import (
    A_OF,
    B_OF,
    AdapterWeights,
    FullWeights,
    SparseValues,
    WeightDelta,
    WeightMirror,
    WeightUpdate,
    make_delta,
)
from gcore_rollout.weight_sync.weight_references import WeightReferences

_INDICES = "/indices"
_VALUES = "/values"
"""Ends of the names of what a sparse tensor is sent as; Hugging Face names have no slash."""
_MOST_UPDATES = 16
_MOST_BYTES = 0.5
"""A history begins again when its changes have so many times the bytes of the weights."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Update:
    """The weights of one version, whole or as changes, in the object store."""

    version: int
    base_version: int | None
    """Version that the changes are made to; None: the tensors are whole."""
    layout: Layout
    """All tensors, changed or not."""
    tensors: WeightReferences
    scaling: float | None = None
    """Scaling of the adapters among the tensors; None: there are none."""

    async def fetch(self) -> WeightUpdate:
        """Return the update once it is on this node."""
        tensors = dict(await self.tensors.fetch())
        adapters: AdapterWeights | None = None
        if self.scaling is not None:
            base_version = self.version if self.base_version is None else self.base_version
            factors = {
                name: tensors.pop(name) for name in list(tensors) if name.endswith((A_OF, B_OF))
            }
            adapters = AdapterWeights(
                base_version=base_version,
                version=self.version,
                scaling=self.scaling,
                tensors=factors,
            )
        if self.base_version is None:
            return FullWeights(version=self.version, tensors=tensors.items(), adapters=adapters)
        if adapters is not None:
            return adapters
        sparse: dict[str, SparseValues] = {}
        dense: dict[str, torch.Tensor] = {}
        for name in self.layout:
            if name + _INDICES in tensors:
                sparse[name] = (tensors[name + _INDICES], tensors[name + _VALUES])
            if name in tensors:
                dense[name] = tensors[name]
        return WeightDelta(
            base_version=self.base_version,
            version=self.version,
            layout=self.layout,
            sparse=sparse,
            dense=dense,
        )


@dataclass(frozen=True, eq=False)
class WeightHistory:
    """The weights of a version: whole ones of an earlier version, and all changes since; pickled as references.

    Example:
        >>> async def follow(history: WeightHistory, mirror: WeightMirror) -> str:
        ...     await history.apply_to(mirror)
        ...     return f"version {mirror.version}, by {history.sent_bytes} bytes"
        >>> weights = [("head", torch.empty(3, device="meta"))]  # Other ranks put what is on the meta device.
        >>> parts = [DeltaSender().put(weights, version=1, base_version=None) for _ in range(2)]
        >>> WeightHistory.join(parts).version
        1
    """

    updates: Sequence[_Update]
    digests: Digests = field(default_factory=dict[str, Mapping[str, Digest]])
    """Digests of all tensors of the last version; empty if they came with none."""
    is_whole = True
    num_writes = 1

    @property
    def version(self) -> int:
        return self.updates[-1].version

    @property
    def sent_bytes(self) -> int:
        """Bytes that were sent for the last version."""
        return self.updates[-1].tensors.size_bytes

    @property
    def next_base(self) -> int | None:
        """The version that the next changes should be made to; None: the next weights should be whole."""
        changes = self.updates[1:]
        changed_bytes = sum(change.tensors.size_bytes for change in changes)
        most_bytes = _MOST_BYTES * self.updates[0].tensors.size_bytes
        if len(changes) < _MOST_UPDATES and changed_bytes < most_bytes:
            return self.version
        return None

    @staticmethod
    def join(parts: "Iterable[WeightHistory]") -> "WeightHistory":
        """Return the last version of which each of several ranks has sent a part."""
        lasts = [part.updates[-1] for part in parts]
        layout: dict[str, TensorSpec] = {}
        for last in lasts:
            layout.update(last.layout)
        update = replace(
            lasts[0],
            layout=layout,
            tensors=WeightReferences.join(last.tensors for last in lasts),
        )
        return WeightHistory([update], update.tensors.digests)

    def after(self, before: "WeightHistory | None") -> "WeightHistory":
        """Return the history with the updates that this one's changes are made to."""
        if self.updates[0].base_version is None:
            return self
        assert before is not None
        earlier = before.updates
        if self.updates[0].scaling is not None:
            # Adapters replace those of before.
            earlier = before.updates[:1]
        return replace(self, updates=[*earlier, *self.updates])

    async def apply_to(self, mirror: WeightMirror) -> None:
        """Give the engine of a mirror these weights; what it has already is not sent again."""
        here = mirror.version, mirror.base_version
        num_known = 0
        for number, update in enumerate(self.updates, start=1):
            if update.version in here:
                num_known = number
        await mirror.apply(*[await update.fetch() for update in self.updates[num_known:]])

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise TypeError("a WeightHistory can only be given to a RayEngine")

    def reading(self) -> AbstractContextManager[None]:
        """Do nothing: the weights are never overwritten."""
        return nullcontext()


class DeltaSender:
    """Sends a rank's part of the weights: whole tensors at first, and then their changes.

    It keeps a copy of its tensors in the host's memory, unless they have adapters.

    Example:
        >>> sender = DeltaSender()
        >>> weights = [("head", torch.empty(3, device="meta"))]  # Tensors on other devices need a Ray cluster.
        >>> first = sender.put(weights, version=1, base_version=None)
        >>> second = sender.put(weights, version=2, base_version=first.next_base).after(first)
        >>> second.version, second.sent_bytes
        (2, 0)
    """

    def __init__(self) -> None:
        self._sent: dict[str, torch.Tensor] = {}
        self._version: int | None = None
        self._frozen_version = 0
        """Version with which the frozen weights were sent, of weights with adapters."""

    def put(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int, base_version: int | None
    ) -> WeightHistory:
        """Put this rank's part of the weights into the object store of this node.

        Args:
            weights: those on the meta device are put by other ranks. If they have ``unmerged`` ones, the adapters are
                put, at first with the frozen weights, and the merged ones are not iterated over.
            base_version: version that changes should be made to; None, or another one than this rank has sent last:
                the tensors are sent whole.
        """
        if base_version != self._version:
            base_version = None
        unmerged: UnmergedWeights | None = getattr(weights, "unmerged", None)
        sent: Iterable[tuple[str, torch.Tensor]]
        self._version = version
        if unmerged is not None:
            sent = unmerged.adapters()
            if base_version is None:
                sent = chain(unmerged.frozen(), sent)
                self._frozen_version = version
            else:
                base_version = self._frozen_version
        elif base_version is None:
            self._sent = {}
            sent = self._copy_each(weights)
        else:
            changes = make_delta(
                self._sent, self._copy_each(weights), base_version=base_version, version=version
            )
            tensors = dict(changes.dense)
            for name, (indices, values) in changes.sparse.items():
                tensors[name + _INDICES] = indices
                tensors[name + _VALUES] = values
            sent = tensors.items()
        references = WeightReferences.put(sent)
        references.digests = digests_of(weights)
        update = _Update(
            version=version,
            base_version=base_version,
            layout=layout_of(self._sent),
            tensors=references,
            scaling=unmerged and unmerged.scaling,
        )
        return WeightHistory([update], references.digests)

    def _copy_each(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's tensors, and keep a copy of each once it has been compared with the one before."""
        for name, tensor in weights:
            if tensor.is_meta:
                continue
            yield name, tensor
            if name in self._sent:
                self._sent[name].copy_(tensor.detach())
            else:
                self._sent[name] = host_copy(tensor)
