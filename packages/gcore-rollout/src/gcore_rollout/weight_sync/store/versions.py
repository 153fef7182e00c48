"""Versions of the weights below a URL: their writer, and their reader on another site.

``parts/VERSION-RANDOM/NUMBER.safetensors`` are the parts of a version, and ``versions/VERSION-full`` or
``versions/VERSION-delta`` is its manifest. A version exists if its manifest does.
"""

import asyncio
import hashlib
import json
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import torch
from safetensors.torch import load, save

from gcore_rollout.errors import CorruptWeightsError, WeightSyncError, require
from gcore_rollout.weight_sync.layout import Layout, from_json, host_copy, layout_of, to_json
from gcore_rollout.weight_sync.store.objects import Objects, Part
from gcore_rollout.weight_sync.updates import FullWeights, SparseValues, WeightDelta, apply_delta, make_delta

_TRIES = 3
_PARTS = "parts/"
_MANIFEST = re.compile(r"versions/(\d+)-(full|delta)")
_DENSE, _INDICES, _VALUES = "dense/", "indices/", "values/"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of one version."""

    version: int
    base_version: int | None
    """The version that it changes; None: it is a full one."""
    layout: Layout
    """All weights."""
    tensors: Layout
    """Tensors in the parts, in this order, each flattened and cut where a part was full."""
    parts: tuple[Part, ...]

    @property
    def key(self) -> str:
        return f"versions/{self.version:012d}-{'full' if self.base_version is None else 'delta'}"

    @property
    def size_bytes(self) -> int:
        """Size of all parts."""
        return sum(part.size_bytes for part in self.parts)

    def to_bytes(self) -> bytes:
        """Return a line with a checksum, followed by the JSON."""
        body = {**vars(self), "layout": to_json(self.layout), "tensors": to_json(self.tensors)}
        text = json.dumps(body).encode()
        return _sha256(text).encode() + b"\n" + text

    @classmethod
    def from_bytes(cls, data: bytes, *, key: str) -> Self:
        """Read a manifest that `to_bytes` returned; a `CorruptWeightsError` if the checksum is wrong."""
        checksum, _, text = data.partition(b"\n")
        if checksum.decode(errors="replace") != _sha256(text):
            raise CorruptWeightsError(f"{key} is damaged: its SHA-256 is not the one in its first line")
        body: dict[str, Any] = json.loads(text)
        body |= {name: from_json(body[name]) for name in ("layout", "tensors")}
        body["parts"] = tuple(Part(*part) for part in body["parts"])
        return cls(**body)

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


def _tensors_of(dense: Mapping[str, torch.Tensor], sparse: Mapping[str, SparseValues]) -> dict[str, torch.Tensor]:
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


def _versions_in(keys: Iterable[str]) -> dict[int, str]:
    """Return the versions whose manifests are among these keys, in order, with the keys."""
    return {int(found[1]): key for key in sorted(keys) if (found := _MANIFEST.fullmatch(key))}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(eq=False)
class WeightPublisher:
    """Writes versions of the weights, in full or as what changed since the last one.

    A manifest is written last and atomically; so a publisher that is killed leaves only unused parts, which the next
    one removes. A new publisher starts with a full version. Before it writes a version, it removes those older than the
    last ``keep`` full ones: their manifests now, their parts at the next version, so that earlier readers have all that
    time to finish.

    It keeps a copy of the last version in the host's memory. One publisher to a URL; its calls block.
    """

    url: str
    """See `Objects`."""
    _: KW_ONLY
    full_every: int = 8
    """Period of full versions; 1: all are full."""
    keep: int = 2
    """Number of full versions that stay, with the deltas after them."""
    part_bytes: int = 64 << 20
    """Largest number of bytes of tensors in an object."""
    max_in_flight: int = 4
    """Largest number of parts that are written concurrently."""

    def __post_init__(self) -> None:
        for name, least in (("full_every", 1), ("keep", 1), ("part_bytes", 16), ("max_in_flight", 1)):
            require(name, getattr(self, name), getattr(self, name) >= least, f"at least {least}", ValueError)
        self._objects = Objects(self.url)
        self._last: dict[str, torch.Tensor] = {}
        self._last_version: int | None = None
        self._num_deltas = 0
        """Since the last full version."""

    def publish(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> Manifest:
        """Write a version.

        Args:
            weights: Hugging Face names and full tensors, on any device; requested one by one.
            version: above all existing ones.

        Raises:
            ValueError: the version is not above the existing ones, or after a full version came other names, shapes
                or data types.
            WeightSyncError: another publisher has written this version.
            OSError: the store failed, or did not answer in time (`TimeoutError`); the version is not there.
        """
        keys = self._objects.keys()
        newest = max(_versions_in(keys), default=None)
        if newest is not None and version <= newest:
            raise ValueError(f"version is {version}: {self._objects} has versions up to {newest}, so it must be above")
        self._clean(keys)
        base = self._last_version
        if base is None or base != newest or self._num_deltas + 1 >= self.full_every:
            return self._publish_full({name: host_copy(tensor) for name, tensor in weights}, version)
        delta = make_delta(self._last, weights, base_version=base, version=version)
        if delta.dense.keys() == self._last.keys():
            return self._publish_full(dict(delta.dense), version)
        manifest = self._write(_tensors_of(delta.dense, delta.sparse), delta.layout, version, base=base)
        apply_delta(self._last, delta, version=base)
        self._last_version, self._num_deltas = version, self._num_deltas + 1
        return manifest

    def _publish_full(self, weights: dict[str, torch.Tensor], version: int) -> Manifest:
        manifest = self._write(_tensors_of(weights, {}), layout_of(weights), version, base=None)
        self._last, self._last_version, self._num_deltas = weights, version, 0
        return manifest

    def _write(self, tensors: dict[str, torch.Tensor], layout: Layout, version: int, *, base: int | None) -> Manifest:
        """Write the parts of a version, and then its manifest."""
        folder = f"{_PARTS}{version:012d}-{secrets.token_hex(8)}"

        def start() -> Iterator[tuple[Part, Any]]:
            for number, slices in enumerate(cut(tensors, self.part_bytes)):
                data = save(slices)
                part = Part(f"{folder}/{number:06d}.safetensors", len(data), _sha256(data))
                yield part, self._objects.start_write(part.key, data)

        parts = tuple(part for part, _ in self._objects.results(start(), self.max_in_flight))
        manifest = Manifest(version=version, base_version=base, layout=layout, tensors=layout_of(tensors), parts=parts)
        if not self._objects.create(manifest.key, manifest.to_bytes()):
            raise WeightSyncError(f"{self._objects} has version {manifest.version} already, by another publisher")
        return manifest

    def _clean(self, keys: Sequence[str]) -> None:
        """Remove parts without a manifest, then the manifests of old versions; ``keys`` are all existing ones."""
        there = _versions_in(keys)
        for folder in {key.rpartition("/")[0] for key in keys if key.startswith(_PARTS)}:
            if int(folder.removeprefix(_PARTS).partition("-")[0]) not in there:
                self._objects.delete_folder(folder)
        full = [version for version, key in there.items() if key.endswith("-full")]
        oldest = min(full[-self.keep :], default=0)
        for version, key in there.items():
            if version < oldest:
                self._objects.delete(key)


class _RemovedError(Exception):
    """An object has been removed."""


class WeightSubscriber:
    """Loads versions of the weights, and reads at most ``max_in_flight`` parts concurrently; it writes nothing."""

    def __init__(self, url: str, *, max_in_flight: int = 4) -> None:
        require("max_in_flight", max_in_flight, max_in_flight >= 1, "at least 1", ValueError)
        self._objects = Objects(url)
        self._max_in_flight = max_in_flight

    async def versions(self) -> list[int]:
        """Return the existing versions in order."""
        return list(_versions_in(await asyncio.to_thread(self._objects.keys)))

    async def wait(self, *, newer_than: int | None, timeout_s: float, poll_s: float = 1.0) -> int:
        """Return the newest version once it is above ``newer_than`` (None: once there is one); else `TimeoutError`."""
        end_s = time.monotonic() + timeout_s
        while True:
            newest = max(await self.versions(), default=None)
            if newest is not None and (newer_than is None or newest > newer_than):
                return newest
            if time.monotonic() >= end_s:
                raise TimeoutError(f"{self._objects}: no version above {newer_than} within {timeout_s} s")
            await asyncio.sleep(min(poll_s, timeout_s))

    async def load(self, *, have: int | None = None) -> list[FullWeights | WeightDelta]:
        """Return the updates that lead to the newest version, for one call of `WeightMirror.apply`.

        These are the deltas since ``have`` if there is no full version in between, else the last full version and the
        deltas since; none if there is nothing above ``have``.

        Args:
            have: the version of the current weights; None: there are none.

        Raises:
            CorruptWeightsError: an object is damaged, or one of an existing manifest is missing.
            OSError: the store failed, or did not answer in time (`TimeoutError`).
        """
        return await asyncio.to_thread(self._load, have)

    def _load(self, have: int | None) -> list[FullWeights | WeightDelta]:
        missing = ""
        for _ in range(_TRIES):
            try:
                return [m.update_of(joined(m.tensors, self._parts(m))) for m in self._chain(have)]
            except _RemovedError as error:
                # Either this reader was so slow that its versions were removed, or the store has lost an object.
                missing = str(error)
        raise CorruptWeightsError(f"{self._objects}: {missing} is missing")

    def _chain(self, have: int | None) -> list[Manifest]:
        """Return the manifests that lead to the newest version, in order."""
        there = _versions_in(self._objects.keys())
        newest = max(there, default=None)
        if newest is None or (have is not None and newest <= have):
            return []
        chain: list[Manifest] = []
        version: int | None = newest
        while version is not None and version != have:
            if version not in there:
                raise _RemovedError(f"the manifest of version {version}")
            key = there[version]
            data = _value(key, self._objects.result(self._objects.start_read(key)))
            chain.append(Manifest.from_bytes(data, key=f"{self._objects}: {key}"))
            version = chain[-1].base_version
        return chain[::-1]

    def _parts(self, manifest: Manifest) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the parts of a version in order, while the next ones are read."""
        reads = ((part, self._objects.start_read(part.key)) for part in manifest.parts)
        for part, found in self._objects.results(reads, self._max_in_flight):
            data = _value(part.key, found)
            if _sha256(data) != part.sha256:
                what = "its SHA-256 is not that of what was written"
                raise CorruptWeightsError(f"{self._objects}: {part.key} is damaged: {what}")
            yield load(data)


def _value(key: str, found: Any) -> bytes:
    if found.state != "value":
        raise _RemovedError(key)
    return found.value
