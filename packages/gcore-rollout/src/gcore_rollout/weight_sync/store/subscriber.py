"""The engine's side of a store: what a publisher on another site wrote below a URL."""

import asyncio
import time
from collections import deque
from collections.abc import Iterator

import torch
from safetensors.torch import load

from gcore_rollout.errors import CorruptWeightsError
from gcore_rollout.weight_sync.delta import WeightDelta
from gcore_rollout.weight_sync.mirror import FullWeights
from gcore_rollout.weight_sync.store.manifest import Manifest, Part, joined, manifest_key, sha256, versions_in
from gcore_rollout.weight_sync.store.objects import Objects, Pending

_TRIES = 3


class _RemovedError(Exception):
    """An object is gone that was there."""


class WeightSubscriber:
    """Loads versions of the weights; it writes nothing.

    Args:
        url: see `Objects`.
        max_in_flight: most parts that are read at a time.
    """

    def __init__(self, url: str, *, max_in_flight: int = 4) -> None:
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; expected at least 1")
        self._objects = Objects(url)
        self._max_in_flight = max_in_flight

    async def versions(self) -> list[int]:
        """Those that are there, in order."""
        return list(await asyncio.to_thread(self._versions))

    async def wait(self, *, newer_than: int | None, timeout_s: float, poll_s: float = 1.0) -> int:
        """The newest version, as soon as it is above ``newer_than``; None: as soon as there is one.

        Raises:
            TimeoutError: there is none in time.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            newest = max(await self.versions(), default=None)
            if newest is not None and (newer_than is None or newest > newer_than):
                return newest
            if time.monotonic() >= end_s:
                raise TimeoutError(f"{self._objects}: no version above {newer_than} within {timeout_s} s")
            await asyncio.sleep(min(poll_s, timeout_s))

    async def load(self, *, have: int | None = None) -> list[FullWeights | WeightDelta]:
        """The updates that lead to the newest version, to be given to `WeightMirror.apply` together.

        These are the deltas since ``have`` if there is no full version in between, else the last full version and the
        deltas since; none if there is nothing above ``have``.

        Args:
            have: the version of the weights that are there; None: none are.

        Raises:
            CorruptWeightsError: an object is damaged, or one is missing whose manifest is there.
            OSError: the store failed, or did not answer in time (`TimeoutError`).
        """
        return await asyncio.to_thread(self._load, have)

    def _versions(self) -> dict[int, str]:
        return dict(versions_in(self._objects.keys()))

    def _load(self, have: int | None) -> list[FullWeights | WeightDelta]:
        missing = ""
        for _ in range(_TRIES):
            try:
                return [m.update_of(joined(m.tensors, self._parts(m))) for m in self._chain(have)]
            except _RemovedError as error:
                # Either this reader was so slow that its versions were removed, or the store has lost something.
                missing = str(error)
        raise CorruptWeightsError(f"{self._objects}: {missing} is missing")

    def _chain(self, have: int | None) -> list[Manifest]:
        """What leads to the newest version, in order."""
        there = versions_in(self._objects.keys())
        newest = max(there, default=None)
        if newest is None or (have is not None and newest <= have):
            return []
        chain: list[Manifest] = []
        version: int | None = newest
        while version is not None and version != have:
            key = manifest_key(version, there.get(version, "full"))
            data = self._value(key, self._objects.start_read(key))
            chain.append(Manifest.from_bytes(data, key=f"{self._objects}: {key}"))
            version = chain[-1].base_version
        return chain[::-1]

    def _parts(self, manifest: Manifest) -> Iterator[dict[str, torch.Tensor]]:
        """Of a version, in order, while the next ones are read."""
        reading = deque[tuple[Part, Pending]]()
        for part in manifest.parts:
            reading.append((part, self._objects.start_read(part.key, part.size_bytes)))
            if len(reading) == self._max_in_flight:
                yield self._checked(*reading.popleft())
        while reading:
            yield self._checked(*reading.popleft())

    def _checked(self, part: Part, read: Pending) -> dict[str, torch.Tensor]:
        data = self._value(part.key, read)
        if sha256(data) != part.sha256:
            raise CorruptWeightsError(
                f"{self._objects}: {part.key} is damaged: its SHA-256 is not that of what was written"
            )
        return load(data)

    def _value(self, key: str, read: Pending) -> bytes:
        found = read.result()
        if found.state != "value":
            raise _RemovedError(key)
        return found.value
