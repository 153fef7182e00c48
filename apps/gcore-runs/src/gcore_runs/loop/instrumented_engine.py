"""Engines whose work is recorded, whose weights are compared with the trainer's, and whose processes log to files."""

from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from gcore_controller import DeviceTimers
from gcore_rollout import CheckedEngine, Engine, RequestT, SampleT, WeightRecord, WrappedEngine
from gcore_runs.logs import logged

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Instrumentation:
    """Instrumentation of the replicas of a model. Each is named by its role and its number."""

    role: Literal["engine", "judge"] = "engine"
    devices: DeviceTimers | None = None
    """Record when the replicas work."""
    logs: Path | None = None
    """Folder of the log files of replicas that are processes of their own."""
    device: Literal["engine", "judge"] | None = None
    """The role whose devices the replicas share; None: they have devices of their own."""
    record: WeightRecord = field(default_factory=WeightRecord)
    """The weights that the replicas of a policy should have."""
    announce: Callable[[str], None] | None = None
    """Called with a line when a replica has died; see `EngineReplicas`."""

    def instrument(self, engine: Engine[RequestT, SampleT], number: int) -> Engine[RequestT, SampleT]:
        """Wrap the replica of this number."""
        if self.role == "engine":
            engine = CheckedEngine(engine, name=f"engine {number}", record=self.record)
        if self.devices is None:
            return engine
        stage = "gen" if self.role == "engine" else "reward"
        name, device = f"{self.role} {number}", f"{self.device or self.role} {number}"
        return TimedEngine(engine, self.devices, device, stage=stage, name=name)

    def logged(self, make: Callable[[], T], number: int) -> Callable[[], T]:
        """Wrap the function that builds the replica of this number, so that its process logs to a file."""
        if self.logs is None:
            return make
        return partial(logged, self.logs, self.role, number, make)


NO_INSTRUMENTATION = Instrumentation()


class TimedEngine(WrappedEngine[RequestT, SampleT]):
    """An engine whose calls are recorded: new weights as stage sync, sleep and wake as swap, samples as ``stage``.

    Args:
        engine: what is wrapped.
        devices: where calls are recorded.
        device: name of its row in the timeline.
        stage: stage of generation; the work of samples is counted there.
        name: name in announcements; None: that of the device.
    """

    def __init__(
        self,
        engine: Engine[RequestT, SampleT],
        devices: DeviceTimers,
        device: str,
        *,
        stage: str = "gen",
        name: str | None = None,
    ) -> None:
        super().__init__(engine)
        self.name = name or device
        self._devices = devices
        self._device = device
        self._stage = stage

    async def generate(self, requests: Sequence[RequestT]) -> AsyncGenerator[SampleT]:
        """See `Engine.generate`."""
        with self._devices.stage(self._stage, self._device):
            async with aclosing(super().generate(requests)) as samples:
                async for sample in samples:
                    self._devices.generated[self._stage] += sample.work
                    yield sample

    async def update_weights(self, weights: "Iterable[tuple[str, torch.Tensor]]", *, version: int) -> None:
        """See `Engine.update_weights`."""
        with self._devices.stage("sync", self._device):
            await super().update_weights(weights, version=version)

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        with self._devices.stage("swap", self._device):
            await super().sleep()

    async def wake(self) -> None:
        """See `Engine.wake`."""
        with self._devices.stage("swap", self._device):
            await super().wake()
