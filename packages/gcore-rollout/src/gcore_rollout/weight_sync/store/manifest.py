"""Manifests of stored versions: their tensors, and the parts that hold them.

Below the URL, ``parts/VERSION-RANDOM/NUMBER.safetensors`` are the parts of a version, and
``versions/VERSION-full`` or ``versions/VERSION-delta`` is its manifest. A version exists if its manifest does.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import torch

from gcore_rollout.errors import CorruptWeightsError
from gcore_rollout.weight_sync.layout import Layout, from_json, to_json
from gcore_rollout.weight_sync.updates import FullWeights, SparseValues, WeightDelta

PARTS, VERSIONS = "parts", "versions"
_DENSE, _INDICES, _VALUES = "dense/", "indices/", "values/"

Kind = Literal["full", "delta"]


class Part(NamedTuple):
    """A stored safetensors file of flat slices."""

    key: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of one version."""

    version: int
    base_version: int | None
    """The version that it changes; None: it is a full one."""
    layout: Layout
    """Layout of all weights."""
    tensors: Layout
    """Layout of the tensors in the parts, in this order, each flattened and cut where a part was full."""
    parts: tuple[Part, ...]

    @property
    def key(self) -> str:
        return manifest_key(self.version, "full" if self.base_version is None else "delta")

    @property
    def size_bytes(self) -> int:
        """Size of all parts."""
        return sum(part.size_bytes for part in self.parts)

    def to_bytes(self) -> bytes:
        """Return a line with a checksum, followed by the JSON."""
        body = {**vars(self), "layout": to_json(self.layout), "tensors": to_json(self.tensors)}
        text = json.dumps(body).encode()
        return sha256(text).encode() + b"\n" + text

    @classmethod
    def from_bytes(cls, data: bytes, *, key: str) -> Self:
        """Read a manifest that `to_bytes` returned; a `CorruptWeightsError` if the checksum is wrong."""
        checksum, _, text = data.partition(b"\n")
        if checksum.decode(errors="replace") != sha256(text):
            raise CorruptWeightsError(f"{key} is damaged: its SHA-256 is not the one in its first line")
        body: dict[str, Any] = json.loads(text)
        body |= {name: from_json(body[name]) for name in ("layout", "tensors")}
        return cls(**{**body, "parts": tuple(Part(*part) for part in body["parts"])})

    def update_of(self, tensors: Mapping[str, torch.Tensor]) -> FullWeights | WeightDelta:
        """Return the update that consists of these tensors."""
        dense, indices, values = (
            {name.removeprefix(kind): tensor for name, tensor in tensors.items() if name.startswith(kind)}
            for kind in (_DENSE, _INDICES, _VALUES)
        )
        if self.base_version is None:
            return FullWeights(version=self.version, tensors=dense.items())
        sparse = {name: SparseValues(indices=indices[name], values=values[name]) for name in indices}
        return WeightDelta(
            base_version=self.base_version, version=self.version, layout=self.layout, dense=dense, sparse=sparse
        )


def tensors_of(dense: Mapping[str, torch.Tensor], sparse: Mapping[str, SparseValues]) -> dict[str, torch.Tensor]:
    """Return the tensors for the parts of an update."""
    tensors = {_DENSE + name: tensor for name, tensor in dense.items()}
    for name, part in sparse.items():
        tensors |= {_INDICES + name: part.indices, _VALUES + name: part.values}
    return tensors


def cut(tensors: Mapping[str, torch.Tensor], part_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Yield non-empty parts of at most ``part_bytes``: flat tensors in order, cut where a part is full."""
    part: dict[str, torch.Tensor] = {}
    left_bytes = part_bytes
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1)
        while flat.numel():
            count = left_bytes // flat.itemsize
            if count == 0:
                yield part
                part, left_bytes = {}, part_bytes
                continue
            part[name], flat = flat[:count], flat[count:]
            left_bytes -= part[name].nbytes
    if part:
        yield part


def joined(layout: Layout, parts: Iterable[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the tensors that were cut into these parts; a `CorruptWeightsError` if the parts do not fill them."""
    tensors = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in layout.items()}
    filled = dict.fromkeys(tensors, 0)
    for part in parts:
        for name, piece in part.items():
            start = filled[name]
            tensors[name].view(-1)[start : start + piece.numel()] = piece
            filled[name] += piece.numel()
    if short := [name for name, count in filled.items() if count != layout[name].numel]:
        raise CorruptWeightsError(f"{short[0]!r} has {filled[short[0]]} of {layout[short[0]].numel} elements")
    return tensors


def manifest_key(version: int, kind: Kind) -> str:
    return f"{VERSIONS}/{version:012d}-{kind}"


def versions_in(keys: Iterable[str]) -> dict[int, Kind]:
    """Return the versions whose manifests are among these keys, in order."""
    found: dict[int, Kind] = {}
    for key in sorted(keys):
        folder, _, name = key.partition("/")
        number, _, kind = name.partition("-")
        if folder == VERSIONS and number.isdecimal() and kind in ("full", "delta"):
            found[int(number)] = kind
    return found


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
