"""Differences between two steps: leaves, and the tensors' bytes, which are read only where no checksums settle it."""

from collections.abc import Iterator
from functools import cache, partial

from gcore_ckpt.format.boxes import Box
from gcore_ckpt.format.stored import StoredTensor
from gcore_ckpt.format.tree import View
from gcore_ckpt.loading.reader import StepLeaf, StepReader, step_leaves

_PART_BYTES = 64 << 20
_THREADS = 4


def compare(a: StepReader, b: StepReader) -> Iterator[tuple[str, str, str, str]]:
    """Yield the leaves that are not the same in two open steps, in the order of the first.

    For each it says what differs (`missing`, `kind`, `dtype`, `shape`, `bytes` or `value`), its path, and what each
    step has there; empty if nothing.
    """
    leaves_a = _by_path(a)
    leaves_b = _by_path(b)
    are_same = cache(partial(_are_same, a, b))  # tensors may share their memory
    for path in [*leaves_a, *(path for path in leaves_b if path not in leaves_a)]:
        leaf_a = leaves_a.get(path)
        leaf_b = leaves_b.get(path)
        text_a = _describe(a, leaf_a)
        text_b = _describe(b, leaf_b)
        is_same = False
        if leaf_a is None or leaf_b is None:
            aspect = "missing"
        elif leaf_a.tensor is None and leaf_b.tensor is None:
            aspect = "value"
            is_same = text_a == text_b
        elif leaf_a.tensor is None or leaf_b.tensor is None:
            aspect = "kind"
        elif _shape(a, leaf_a) != _shape(b, leaf_b):
            aspect = "shape"
        elif a.index.tensors[leaf_a.tensor].dtype != b.index.tensors[leaf_b.tensor].dtype:
            aspect = "dtype"
        else:
            aspect = "bytes"
            is_same = are_same(leaf_a.tensor, leaf_b.tensor, leaf_a.view, leaf_b.view)
        if not is_same:
            yield aspect, path, text_a, text_b


def _by_path(reader: StepReader) -> dict[str, StepLeaf]:
    leaves: dict[str, StepLeaf] = {}
    for leaf in step_leaves(reader):
        path = leaf.path
        while path in leaves:  # {"a.b": x, "a": {"b": y}}
            path += "#"
        leaves[path] = leaf
    return leaves


def _describe(reader: StepReader, leaf: StepLeaf | None) -> str:
    if leaf is None:
        return ""
    if leaf.tensor is None:
        return repr(leaf.value)
    return f"{reader.index.tensors[leaf.tensor].dtype} {list(_shape(reader, leaf))}"


def _shape(reader: StepReader, leaf: StepLeaf) -> tuple[int, ...]:
    """Return the shape of a tensor."""
    return reader.index.tensors[leaf.tensor or ""].shape_of(leaf.view)


def _checksums(tensor: StoredTensor) -> dict[tuple[Box, int], str]:
    """Return the checksums by the box and the size of the blocks; empty where there are none."""
    checksums: dict[tuple[Box, int], str] = {}
    for shard in tensor.shards:
        if shard.box.size and shard.checksums is not None:
            checksums[shard.box, shard.block_bytes] = shard.checksums
    return checksums


def _are_same(
    a: StepReader, b: StepReader, name_a: str, name_b: str, view_a: View | None, view_b: View | None
) -> bool:
    """Return whether two tensors, or views of them, of one type and shape hold the same bytes."""
    tensor = a.index.tensors[name_a]
    is_view = view_a is not None or view_b is not None
    checksums_a = _checksums(tensor)
    checksums_b = _checksums(b.index.tensors[name_b])
    if checksums_a and not is_view and checksums_a.keys() == checksums_b.keys():
        return checksums_a == checksums_b
    import torch

    from gcore_ckpt.loading.loader import read_box, read_whole
    from gcore_ckpt.threads import Workers

    with Workers(_THREADS) as workers:
        if is_view:
            data = read_whole(a, name_a, view_a, workers)
            return torch.equal(data, read_whole(b, name_b, view_b, workers))
        for part in Box.of_shape(tensor.shape).split(_PART_BYTES // tensor.itemsize):
            data = read_box(a, name_a, part, workers)
            if not torch.equal(data, read_box(b, name_b, part, workers)):
                return False
    return True
