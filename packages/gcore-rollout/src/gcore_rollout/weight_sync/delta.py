"""What changed between two versions of the weights, to the bit.

An update of bfloat16 weights with the small steps of reinforcement learning leaves most elements as they were, for a
step below half a unit in the last place rounds to nothing. What did change is sent as positions and values.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass

import numpy as np
import torch

from gcore_rollout.errors import WrongBaseError
from gcore_rollout.weight_sync.layout import Layout, TensorSpec, bits, check_layout, host_copy, layout_of

_MOST_INT32 = 2**31 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class SparseValues:
    """Some elements of a tensor."""

    indices: torch.Tensor
    """Where they are in the flattened tensor, shape [N], ascending; int32, or int64 beyond 2**31 - 1 elements."""
    values: torch.Tensor
    """What they are now, shape [N]."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightDelta:
    """Turns weights of one version into those of another. Its tensors are its own, in the host's memory."""

    base_version: int
    version: int
    layout: Layout
    """Of all the weights, changed or not."""
    sparse: Mapping[str, SparseValues]
    """Tensors of which few elements changed."""
    dense: Mapping[str, torch.Tensor]
    """Tensors of which so many did that positions would take more bytes than what they leave out."""

    @property
    def size_bytes(self) -> int:
        """Of all tensors to be sent."""
        sparse = sum(part.indices.nbytes + part.values.nbytes for part in self.sparse.values())
        return sparse + sum(tensor.nbytes for tensor in self.dense.values())


def make_delta(
    base: Mapping[str, torch.Tensor],
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    base_version: int,
    version: int,
) -> WeightDelta:
    """What to change in ``base`` to have ``weights``.

    Args:
        base: contiguous tensors in the host's memory; copies, not those that a trainer changes in place.
        weights: the same names, shapes and data types, on any device; asked for one by one.
        base_version: of ``base``.
        version: of ``weights``.

    Raises:
        ValueError: other names, shapes or data types, or elements of more than 8 bytes.
    """
    layout, own = dict[str, TensorSpec](), layout_of(base)
    sparse: dict[str, SparseValues] = {}
    dense: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        layout[name] = TensorSpec.of(tensor)
        check_layout({name: layout[name]}, {name: own[name]} if name in own else {})
        change = _change(base[name], tensor.detach().to("cpu").contiguous())
        if isinstance(change, SparseValues):
            sparse[name] = change
        elif change is not None:
            dense[name] = change
    check_layout(layout, own)
    return WeightDelta(base_version=base_version, version=version, layout=layout, sparse=sparse, dense=dense)


def apply_delta(weights: MutableMapping[str, torch.Tensor], delta: WeightDelta, *, version: int) -> WeightDelta:
    """Change weights in place, and return the delta that changes them back.

    Few elements are overwritten in their tensor; a tensor of which many changed is replaced by another.

    Args:
        weights: contiguous tensors in the host's memory.
        delta: what to change.
        version: of ``weights``.

    Raises:
        WrongBaseError: these are not the weights that the delta was made from.
        ValueError: they have other names, shapes or data types, or the delta is not whole.
    """
    if version != delta.base_version:
        raise WrongBaseError(
            f"the delta to version {delta.version} changes version {delta.base_version}, but version {version} is "
            "here: send a full update",
            version=version,
        )
    check_layout(delta.layout, layout_of(weights))
    _check_whole(delta)
    if strided := [name for name in delta.sparse if not weights[name].is_contiguous()]:
        raise ValueError(f"weight {strided[0]!r} is not contiguous: it cannot be changed in place")
    sparse: dict[str, SparseValues] = {}
    for name, part in delta.sparse.items():
        flat = bits(weights[name])
        old = flat[part.indices].view(part.values.dtype)
        sparse[name] = SparseValues(indices=part.indices, values=old)
        flat[part.indices] = bits(part.values)
    dense = {name: weights[name] for name in delta.dense}
    weights.update({name: host_copy(tensor) for name, tensor in delta.dense.items()})
    return WeightDelta(
        base_version=delta.version, version=delta.base_version, layout=delta.layout, sparse=sparse, dense=dense
    )


def _change(old: torch.Tensor, new: torch.Tensor) -> SparseValues | torch.Tensor | None:
    """None: nothing changed."""
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
    return SparseValues(indices=indices.to(index_dtype), values=new_bits[indices].view(new.dtype))


def _check_whole(delta: WeightDelta) -> None:
    """Everything fits the layout that the delta itself tells."""
    for name in (*delta.dense, *delta.sparse):
        if name not in delta.layout:
            raise ValueError(f"the delta changes {name!r}, which its layout does not have")
    check_layout(layout_of(delta.dense), {name: delta.layout[name] for name in delta.dense})
    for name, part in delta.sparse.items():
        spec, indices, values = delta.layout[name], part.indices, part.values
        if indices.dim() != 1 or indices.shape != values.shape or values.dtype != spec.dtype:
            raise ValueError(
                f"the delta of {name!r} has indices {list(indices.shape)} and values {TensorSpec.of(values)}: "
                f"as many of both, of {spec.dtype}, are needed"
            )
        if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < spec.numel:
            raise ValueError(f"the delta of {name!r} has an index outside its {spec.numel} elements")
