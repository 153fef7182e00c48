"""Partial updates of weights, and a copy of an engine's weights to which they can be applied.

A delta has the exact difference of two versions: an update of bfloat16 weights with the small steps of reinforcement
learning leaves most elements as they were, because a step below half a unit in the last place rounds to zero. Changed
elements are sent as positions and values. Adapters are the low-rank matrices A and B, which are merged into the frozen
weights: W = W0 + scaling B A (arXiv 2106.09685, section 4.1), where scaling is alpha / rank.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
import torch

from gcore_rollout.engines.protocol import Engine
from gcore_rollout.errors import RolloutError
from gcore_rollout.weight_sync.digests import Digest, DigestedWeights, digest, dtype_name
from gcore_rollout.weight_sync.layout import (
    Layout,
    TensorSpec,
    bits,
    check_layout,
    host_copy,
    layout_of,
)

_MOST_INT32 = 2**31 - 1

A_OF = ".lora_A.default.weight"
B_OF = ".lora_B.default.weight"
"""Suffixes that peft adds to a layer's name for its A [rank, in] and its B [out, rank]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AdapterWeights:
    """All adapters of a model at one version.

    Example:
        >>> adapters = AdapterWeights(
        ...     base_version=1,
        ...     version=2,
        ...     scaling=2.0,
        ...     tensors={"head" + A_OF: torch.ones(1, 3), "head" + B_OF: torch.ones(4, 1)},
        ... )
        >>> sorted(adapters.layers), adapters.size_bytes
        (['head'], 28)
        >>> dict(merge_adapters({"head.weight": torch.zeros(4, 3)}, adapters))["head.weight"][0]
        tensor([2., 2., 2.])
    """

    base_version: int
    """Version of the frozen weights with which they were trained."""
    version: int
    scaling: float
    """alpha / rank."""
    tensors: Mapping[str, torch.Tensor]
    """By peft's names: a layer's Hugging Face name followed by `A_OF` or `B_OF`."""

    @property
    def size_bytes(self) -> int:
        """Size of all tensors to be sent."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def layers(self) -> frozenset[str]:
        """Hugging Face names of the layers that have one."""
        return frozenset(name.removesuffix(A_OF).removesuffix(B_OF) for name in self.tensors)


def check_adapters(base: Mapping[str, torch.Tensor], adapters: AdapterWeights) -> None:
    """Refuse adapters that these weights cannot be merged with, by a `ValueError`."""
    for name in adapters.tensors:
        if not name.endswith((A_OF, B_OF)):
            raise ValueError(
                f"{name!r} is no name of an adapter; expected one that ends in {A_OF} or {B_OF}"
            )
    for layer in sorted(adapters.layers):
        a = adapters.tensors.get(layer + A_OF)
        b = adapters.tensors.get(layer + B_OF)
        if a is None or b is None:
            raise ValueError(
                f"the adapter of {layer!r} has no {'A' if a is None else 'B'}; expected both"
            )
        if f"{layer}.weight" not in base:
            raise ValueError(f"there is an adapter of {layer!r}, and no weight of that layer")
        shape = tuple(base[f"{layer}.weight"].shape)
        is_product = a.dim() == 2 and b.dim() == 2 and a.shape[0] == b.shape[1]
        if not is_product or (b.shape[0], a.shape[1]) != shape:
            raise ValueError(
                f"the adapter of {layer!r} has A {list(a.shape)} and B {list(b.shape)}; "
                f"expected [rank, {shape[-1]}] and [{shape[0]}, rank]"
            )


def merge_adapters(
    base: Mapping[str, torch.Tensor], adapters: AdapterWeights
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield Hugging Face names and merged weights, one at a time.

    The arithmetic is in float32 at least, and is rounded to the data type of the weights once, at the end, as in a
    trainer that merges before it exports. The adapters have passed `check_adapters`.
    """
    layers = adapters.layers
    for name, tensor in base.items():
        layer = name.removesuffix(".weight")
        if layer in layers:
            wide = torch.promote_types(tensor.dtype, torch.float32)
            a = adapters.tensors[layer + A_OF].to(tensor.device, wide)
            b = adapters.tensors[layer + B_OF].to(tensor.device, wide)
            yield name, (tensor.to(wide) + adapters.scaling * (b @ a)).to(tensor.dtype)
        else:
            yield name, tensor


SparseValues = tuple[torch.Tensor, torch.Tensor]
"""Some elements of a tensor: ascending positions in the flattened tensor [N], and the new values [N]. Positions are
int32, or int64 beyond 2**31 - 1 elements."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightDelta:
    """Turns weights of one version into those of another. Its tensors are its own, in the host's memory."""

    base_version: int
    version: int
    layout: Layout
    """All weights, changed or not."""
    sparse: Mapping[str, SparseValues]
    """Tensors with few changed elements."""
    dense: Mapping[str, torch.Tensor]
    """Tensors with so many changed elements that positions would take more bytes than they save."""

    @property
    def size_bytes(self) -> int:
        """Size of all tensors to be sent."""
        sparse = sum(indices.nbytes + values.nbytes for indices, values in self.sparse.values())
        return sparse + sum(tensor.nbytes for tensor in self.dense.values())


def make_delta(
    base: Mapping[str, torch.Tensor],
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    base_version: int,
    version: int,
) -> WeightDelta:
    """Return the delta from ``base`` to ``weights``.

    Args:
        base: contiguous tensors in the host's memory; copies, not those that a trainer changes in place.
        weights: the same names, shapes and data types, on any device; requested one by one.

    Raises:
        ValueError: other names, shapes or data types, or elements of more than 8 bytes.
    """
    base_layout = layout_of(base)
    layout: dict[str, TensorSpec] = {}
    sparse: dict[str, SparseValues] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        layout[name] = TensorSpec.of(tensor)
        check_layout({name: layout[name]}, {name: base_layout[name]} if name in base_layout else {})
        change = _find_change(base[name], tensor.detach().to("cpu").contiguous())
        if isinstance(change, tuple):
            sparse[name] = change
        elif change is not None:
            dense[name] = change
    check_layout(layout, base_layout)
    return WeightDelta(
        base_version=base_version, version=version, layout=layout, sparse=sparse, dense=dense
    )


def apply_delta(
    weights: MutableMapping[str, torch.Tensor], delta: WeightDelta, *, version: int
) -> WeightDelta:
    """Change weights in place, and return the delta that changes them back.

    Args:
        weights: contiguous tensors in the host's memory, of this ``version``. A tensor with many changes is replaced.

    Raises:
        RolloutError: these are not the weights that the delta was made from.
        ValueError: they have other names, shapes or data types, or the delta is not whole.
    """
    if version != delta.base_version:
        raise _wrong_base(delta, version=version)
    check_layout(delta.layout, layout_of(weights))
    _check_whole(delta)
    for name in delta.sparse:
        if not weights[name].is_contiguous():
            raise ValueError(f"weight {name!r} is not contiguous: it cannot be changed in place")
    sparse: dict[str, SparseValues] = {}
    for name, (indices, values) in delta.sparse.items():
        flat = bits(weights[name])
        old = flat[indices].view(values.dtype)
        sparse[name] = (indices, old)
        flat[indices] = bits(values)
    dense = {name: weights[name] for name in delta.dense}
    weights.update({name: host_copy(tensor) for name, tensor in delta.dense.items()})
    return replace(
        delta, base_version=delta.version, version=delta.base_version, sparse=sparse, dense=dense
    )


def _wrong_base(
    update: WeightDelta | AdapterWeights,
    *,
    version: int | None,
    adapters: AdapterWeights | None = None,
) -> RolloutError:
    """Return the error of an update that does not build on this version, or on these adapters."""
    needs = f"adapters of version {update.version} belong to"
    if isinstance(update, WeightDelta):
        needs = f"delta to version {update.version} changes"
    here = "nothing is"
    if adapters is not None:
        here = f"adapters of version {adapters.version} are"
    elif version is not None:
        here = f"version {version} is"
    message = f"the {needs} version {update.base_version}, but {here} here: send a full update"
    return RolloutError(message)


def _find_change(old: torch.Tensor, new: torch.Tensor) -> SparseValues | torch.Tensor | None:
    """Return the changed elements, or the whole tensor if most changed; None: nothing changed."""
    # NumPy compares and searches in a third of the time that torch takes.
    new_bits = bits(new)
    changed = bits(old).numpy() != new_bits.numpy()
    count = int(np.count_nonzero(changed))
    if count == 0:
        return None
    index_dtype = torch.int32 if new.numel() <= _MOST_INT32 else torch.int64
    if count * (index_dtype.itemsize + new.dtype.itemsize) >= new.nbytes:
        return host_copy(new)
    indices = torch.from_numpy(np.flatnonzero(changed))
    return indices.to(index_dtype), new_bits[indices].view(new.dtype)


def _check_whole(delta: WeightDelta) -> None:
    """Check that all parts fit the delta's own layout."""
    for name in chain(delta.dense, delta.sparse):
        if name not in delta.layout:
            raise ValueError(f"the delta changes {name!r}, which its layout does not have")
    check_layout(layout_of(delta.dense), {name: delta.layout[name] for name in delta.dense})
    for name, (indices, values) in delta.sparse.items():
        spec = delta.layout[name]
        if indices.dim() != 1 or indices.shape != values.shape or values.dtype != spec.dtype:
            raise ValueError(
                f"the delta of {name!r} has indices {list(indices.shape)} and values {TensorSpec.of(values)}; "
                f"expected as many of both, of {spec.dtype}"
            )
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < spec.numel:
            raise ValueError(
                f"the delta of {name!r} has an index outside its {spec.numel} elements"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class FullWeights:
    """All weights of one version.

    Example:
        >>> from safetensors.torch import load_file
        >>> engine = HFEngine.from_pretrained("model")
        >>> update = FullWeights(version=1, tensors=load_file("model/model.safetensors").items())
        >>> asyncio.run(WeightMirror(engine).apply(update))
        >>> engine.weight_version
        1
    """

    version: int
    tensors: Iterable[tuple[str, torch.Tensor]]
    """Hugging Face names and full tensors; a tensor may change once the next is requested."""
    adapters: AdapterWeights | None = None
    """Adapters of the same version, to be merged into the tensors; None: there are none."""


WeightUpdate = FullWeights | WeightDelta | AdapterWeights


class WeightMirror:
    """A copy in the host's memory of the weights that an engine runs, and their version.

    It takes updates in any form and gives the engine all full tensors. Adapters are merged into the last full weights
    and their deltas, never into merged weights, which are not kept. The trainer has no digests of merged weights: they
    are digested here, for an engine that compares what it has taken (`InstrumentedEngine`). If the engine refuses an
    update or fails at it, the mirror goes back to what it was, so a sender may try again; the next update repairs
    whatever a failed one left. It takes the memory of the weights once, and twice while it takes a full update.

    From now on, the engine is updated through this object alone. Without the ``weights`` that it runs, the first update
    has to be a full one.

    Example:
        >>> from safetensors.torch import load_file
        >>> old = load_file("model/model.safetensors")
        >>> engine = HFEngine.from_pretrained("model")
        >>> mirror = WeightMirror(engine, old.items())
        >>> new = {**old, "model.norm.weight": torch.full((128,), 2.0)}
        >>> asyncio.run(mirror.apply(make_delta(old, new.items(), base_version=0, version=1)))
        >>> engine.weight_version, dict(mirror)["model.norm.weight"].sum().item()
        (1, 256.0)
    """

    def __init__(
        self, engine: Engine, weights: Iterable[tuple[str, torch.Tensor]] | None = None
    ) -> None:
        self._engine = engine
        self._base = {name: host_copy(tensor) for name, tensor in weights or ()}
        self._base_version = None if weights is None else engine.weight_version
        self._adapters: AdapterWeights | None = None
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[None]] = set()

    @property
    def version(self) -> int | None:
        """Version of the weights that are here; None: there are none."""
        if self._adapters is None:
            return self._base_version
        return self._adapters.version

    @property
    def base_version(self) -> int | None:
        """Version of the weights that are here without adapters; None: there are none."""
        return self._base_version

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterate over names and full tensors of the current version, read-only and valid until the next update."""
        if self._adapters is None:
            return iter(self._base.items())
        return merge_adapters(self._base, self._adapters)

    async def apply(self, *updates: WeightUpdate) -> None:
        """Apply updates in order, and then give the engine the resulting weights once, even if the caller is cancelled.

        Raises:
            RolloutError: an update builds on weights that are not here; the message has the version of those that are.
            ValueError: a version that is not above the one before, or an update that does not fit the weights.
        """
        if not updates:
            return
        task = asyncio.create_task(self._apply(updates))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await asyncio.shield(task)

    async def _apply(self, updates: Sequence[WeightUpdate]) -> None:
        async with self._lock:
            before = (self._base, self._base_version, self._adapters)
            version_before = self._engine.weight_version
            changes_back: list[tuple[dict[str, torch.Tensor], WeightDelta]] = []
            try:
                for update in updates:
                    self._take(update, changes_back)
                weights = (
                    iter(self) if self._adapters is None else self._add_digests(self._adapters)
                )
                await self._engine.update_weights(weights, version=updates[-1].version)
            except BaseException:
                # Otherwise it failed after it had taken the weights.
                if self._engine.weight_version == version_before:
                    for base, change_back in reversed(changes_back):
                        apply_delta(base, change_back, version=change_back.base_version)
                    self._base, self._base_version, self._adapters = before
                raise

    def _take(
        self, update: WeightUpdate, changes_back: list[tuple[dict[str, torch.Tensor], WeightDelta]]
    ) -> None:
        """Apply an update, and add what was changed in place with the delta that reverts it."""
        if self.version is not None and update.version <= self.version:
            raise ValueError(
                f"version is {update.version}; expected a version above the current {self.version}"
            )
        match update:
            case FullWeights():
                self._base = {name: host_copy(tensor) for name, tensor in update.tensors}
                self._base_version = update.version
                self._adapters = None
                if update.adapters is not None:
                    self._take_adapters(update.adapters)
            case WeightDelta():
                if self._base_version is None or self._adapters is not None:
                    raise _wrong_base(update, version=None, adapters=self._adapters)
                change_back = apply_delta(self._base, update, version=self._base_version)
                changes_back.append((self._base, change_back))
                self._base_version = update.version
            case AdapterWeights():
                self._take_adapters(update)

    def _take_adapters(self, update: AdapterWeights) -> None:
        if update.base_version != self._base_version:
            raise _wrong_base(update, version=self._base_version)
        check_adapters(self._base, update)
        copies = {name: host_copy(tensor) for name, tensor in update.tensors.items()}
        self._adapters = replace(update, tensors=copies)

    def _add_digests(self, adapters: AdapterWeights) -> DigestedWeights:
        """Return the merged weights, with digests that are made when they are asked for."""

        def merge(name: str) -> torch.Tensor:
            return dict(merge_adapters({name: self._base[name]}, adapters))[name]

        return DigestedWeights(
            self, digests={name: _DigestsOnDemand(partial(merge, name)) for name in self._base}
        )


class _DigestsOnDemand(Mapping[str, Digest]):
    """Digests of a tensor by data type, of which few are asked for after an update."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make

    def __getitem__(self, dtype: str) -> Digest:
        return digest(self._make().to(getattr(torch, dtype)))

    def __iter__(self) -> Iterator[str]:
        yield dtype_name(self._make().dtype)

    def __len__(self) -> int:
        return 1
