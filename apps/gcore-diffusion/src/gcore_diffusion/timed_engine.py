"""Engines of images whose work is noted."""

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from gcore_rollout import Engine
from gcore_rollout.diffusion import ImageRequest, ImageSample
from gcore_rollout.forwarding import WrappedEngine
from gcore_runs.devices import DeviceTimers

if TYPE_CHECKING:
    import torch


class TimedEngine(WrappedEngine[ImageRequest, ImageSample]):
    """Notes when an engine makes images (gen) and takes weights (sync).

    Args:
        name: of the device's row; empty: those behind it note their own work.

    Attributes:
        devices: What notes it.
    """

    def __init__(self, engine: Engine[ImageRequest, ImageSample], devices: DeviceTimers, name: str) -> None:
        super().__init__(engine)
        self.devices = devices
        self._names = [name] if name else []

    async def generate(self, requests: Sequence[ImageRequest]) -> AsyncGenerator[ImageSample]:
        """See `Engine.generate`."""
        with self.devices.stage("gen", *self._names):
            async with aclosing(super().generate(requests)) as samples:
                async for sample in samples:
                    yield sample

    async def update_weights(self, weights: "Iterable[tuple[str, torch.Tensor]]", *, version: int) -> None:
        """See `Engine.update_weights`."""
        with self.devices.stage("sync", *self._names):
            await super().update_weights(weights, version=version)
