"""Differences between two steps: leaves, and the tensors' bytes, which are read only where no checksums settle it."""

from collections.abc import Iterator
from dataclasses import dataclass

from gcore_ckpt.format.boxes import Box
from gcore_ckpt.format.index import StoredTensor
from gcore_ckpt.loading.listing import StepLeaf, step_leaves
from gcore_ckpt.loading.reader import StepReader

_PART_BYTES = 64 << 20
_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A leaf that is not the same in both steps.

    Attributes:
        path: Its place, dotted.
        kind: What differs: `missing`, `kind`, `dtype`, `shape`, `bytes` or `value`.
        a: What the first step has; empty if nothing.
        b: What the second step has; empty if nothing.
    """

    path: str
    kind: str
    a: str
    b: str


def compare(a: StepReader, b: StepReader) -> Iterator[Difference]:
    """Return the differences between two open steps, in the order of the first.

    Raises:
        CorruptCheckpointError: One of them is not what was saved.
    """
    leaves_a, leaves_b = _by_path(a), _by_path(b)
    same: dict[tuple[str, str], bool] = {}
    for path in [*leaves_a, *(path for path in leaves_b if path not in leaves_a)]:
        leaf_a, leaf_b = leaves_a.get(path), leaves_b.get(path)
        text_a, text_b = _describe(a, leaf_a), _describe(b, leaf_b)
        if leaf_a is None or leaf_b is None:
            kind = "missing"
        elif leaf_a.tensor is None or leaf_b.tensor is None:
            kind = "kind" if leaf_a.tensor != leaf_b.tensor else "value" if text_a != text_b else ""
        else:
            tensor_a, tensor_b = a.index.tensors[leaf_a.tensor], b.index.tensors[leaf_b.tensor]
            pair = leaf_a.tensor, leaf_b.tensor
            if tensor_a.shape != tensor_b.shape:
                kind = "shape"
            elif tensor_a.dtype != tensor_b.dtype:
                kind = "dtype"
            else:
                if pair not in same:
                    same[pair] = _same_bytes(a, b, *pair)
                kind = "" if same[pair] else "bytes"
        if kind:
            yield Difference(path=path, kind=kind, a=text_a, b=text_b)


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
    tensor = reader.index.tensors[leaf.tensor]
    return f"{tensor.dtype} {list(tensor.shape)}"


def _same_bytes(a: StepReader, b: StepReader, name_a: str, name_b: str) -> bool:
    tensor_a, tensor_b = a.index.tensors[name_a], b.index.tensors[name_b]
    checksums_a, checksums_b = _checksums(tensor_a), _checksums(tensor_b)
    if checksums_a is not None and checksums_b is not None and checksums_a.keys() == checksums_b.keys():
        return checksums_a == checksums_b
    return _read_and_compare(a, b, name_a, name_b)


def _checksums(tensor: StoredTensor) -> dict[tuple[Box, int], str] | None:
    """Return the checksums by the box and the size of the blocks; None where there are none."""
    found: dict[tuple[Box, int], str] = {}
    for shard in tensor.shards:
        if shard.checksums is None:
            return None
        if shard.box.size:
            found[shard.box, shard.block_bytes] = shard.checksums
    return found


def _read_and_compare(a: StepReader, b: StepReader, name_a: str, name_b: str) -> bool:
    import torch

    from gcore_ckpt.loading.restore import Request, fill
    from gcore_ckpt.ranks.leaves import TORCH_DTYPES
    from gcore_ckpt.workers import Workers

    tensor = a.index.tensors[name_a]
    if not tensor.size_bytes:
        return True
    workers = Workers(_THREADS, "gcore-ckpt-read")
    try:
        for part in Box.whole(tensor.shape).split(_PART_BYTES // tensor.itemsize):
            found: list[torch.Tensor] = []
            for reader, name in ((a, name_a), (b, name_b)):
                data = torch.empty(part.size * tensor.itemsize, dtype=torch.uint8)
                target = data.view(TORCH_DTYPES[tensor.dtype]).view(part.shape)
                fill(reader, [Request(name=name, box=part, target=target)], workers)
                found.append(data)
            if not torch.equal(*found):
                return False
    finally:
        workers.close()
    return True
