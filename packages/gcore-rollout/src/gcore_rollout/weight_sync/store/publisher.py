"""The trainer's side of a store: versions of the weights below a URL, for engines on other sites."""

import secrets
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from safetensors.torch import save

from gcore_rollout.errors import WeightSyncError
from gcore_rollout.weight_sync.delta import WeightDelta, apply_delta, make_delta
from gcore_rollout.weight_sync.layout import host_copy, layout_of
from gcore_rollout.weight_sync.store.manifest import (
    PARTS,
    Manifest,
    Part,
    cut,
    manifest_key,
    sha256,
    tensors_of,
    versions_in,
)
from gcore_rollout.weight_sync.store.objects import Objects, Pending


class WeightPublisher:
    """Writes versions of the weights, in full or as what changed since the last one.

    A version is there once its manifest is, which is written last and in one step; so a publisher that is killed leaves
    no more than parts that nobody looks at, and the next one removes them. A new publisher begins with a full version.

    Before it writes a version, it removes those older than the last ``keep`` full ones: their manifests now, their
    parts at the next version, so a reader that began before has all that time to end.

    It keeps a copy of the last version in the host's memory. One publisher to a URL; its calls block.

    Args:
        url: see `Objects`.
        full_every: every so many versions one is full; 1: all are.
        keep: full versions that stay, with the deltas after them.
        part_bytes: most bytes of tensors in an object.
        max_in_flight: most parts that are written at a time.
    """

    def __init__(
        self, url: str, *, full_every: int = 8, keep: int = 2, part_bytes: int = 64 << 20, max_in_flight: int = 4
    ) -> None:
        for name, value, least in (
            ("full_every", full_every, 1),
            ("keep", keep, 1),
            ("part_bytes", part_bytes, 16),
            ("max_in_flight", max_in_flight, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; expected at least {least}")
        self._objects = Objects(url)
        self._full_every = full_every
        self._keep = keep
        self._part_bytes = part_bytes
        self._max_in_flight = max_in_flight
        self._last: dict[str, torch.Tensor] = {}
        self._last_version: int | None = None
        self._num_deltas = 0
        """Since the last full version."""

    def publish(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> Manifest:
        """Write a version.

        Args:
            weights: Hugging Face names and full tensors, on any device; asked for one by one.
            version: above all that are there.

        Raises:
            ValueError: the version is not above those that are there, or after a full version came other names, shapes
                or data types.
            WeightSyncError: somebody else has written this version.
            OSError: the store failed, or did not answer in time (`TimeoutError`); the version is not there.
        """
        keys = self._objects.keys()
        newest = max(versions_in(keys), default=None)
        if newest is not None and version <= newest:
            raise ValueError(f"version is {version}: {self._objects} has versions up to {newest}, so it must be above")
        self._clean(keys)
        if self._last_version is None or newest != self._last_version or self._num_deltas + 1 >= self._full_every:
            return self._publish_full({name: host_copy(tensor) for name, tensor in weights}, version)
        delta = make_delta(self._last, weights, base_version=self._last_version, version=version)
        if delta.dense.keys() == self._last.keys():
            return self._publish_full(dict(delta.dense), version)
        return self._publish_delta(delta)

    def _publish_full(self, weights: dict[str, torch.Tensor], version: int) -> Manifest:
        layout, tensors = layout_of(weights), tensors_of(weights)
        parts = self._write_parts(tensors, version)
        manifest = Manifest(version=version, base_version=None, layout=layout, tensors=layout_of(tensors), parts=parts)
        self._commit(manifest)
        self._last, self._last_version, self._num_deltas = weights, version, 0
        return manifest

    def _publish_delta(self, delta: WeightDelta) -> Manifest:
        tensors = tensors_of(delta.dense, delta.sparse)
        manifest = Manifest(
            version=delta.version,
            base_version=delta.base_version,
            layout=delta.layout,
            tensors=layout_of(tensors),
            parts=self._write_parts(tensors, delta.version),
        )
        self._commit(manifest)
        apply_delta(self._last, delta, version=delta.base_version)
        self._last_version = delta.version
        self._num_deltas += 1
        return manifest

    def _write_parts(self, tensors: dict[str, torch.Tensor], version: int) -> tuple[Part, ...]:
        folder = f"{PARTS}/{version:012d}-{secrets.token_hex(8)}"
        parts: list[Part] = []
        writing = deque[Pending]()
        for slices in cut(tensors, self._part_bytes):
            if len(writing) == self._max_in_flight:
                writing.popleft().result()
            data = save(slices)
            part = Part(key=f"{folder}/{len(parts):06d}.safetensors", size_bytes=len(data), sha256=sha256(data))
            parts.append(part)
            writing.append(self._objects.start_write(part.key, data))
        for write in writing:
            write.result()
        return tuple(parts)

    def _commit(self, manifest: Manifest) -> None:
        if not self._objects.create(manifest.key, manifest.to_bytes()):
            raise WeightSyncError(f"{self._objects} has version {manifest.version} already, by somebody else")

    def _clean(self, keys: Sequence[str]) -> None:
        """Remove parts without a manifest, then the manifests of old versions; ``keys`` are all that are there."""
        there = versions_in(keys)
        for folder in {key.rpartition("/")[0] for key in keys if key.startswith(f"{PARTS}/")}:
            if int(folder.removeprefix(f"{PARTS}/").partition("-")[0]) not in there:
                self._objects.delete_folder(folder)
        full = [version for version, kind in there.items() if kind == "full"]
        oldest = min(full[-self._keep :], default=0)
        for version, kind in there.items():
            if version < oldest:
                self._objects.delete(manifest_key(version, kind))
