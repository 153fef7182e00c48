"""Instrumentation of engines: their work is recorded, their weights are checked, and their processes log to files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from gcore_controller import DeviceTimers
from gcore_rollout import (
    CheckedEngine,
    Engine,
    RequestT,
    SampleT,
    TimedEngine,
    WeightRecord,
    start_replicas,
)
from gcore_runs.logs import logged


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
        name, stage = f"{self.role} {number}", "gen" if self.role == "engine" else "reward"
        if self.role == "engine":
            engine = CheckedEngine(engine, name=name, record=self.record)
        if self.devices is None:
            return engine
        return TimedEngine(engine, self.devices, device=f"{self.device or self.role} {number}", stage=stage, name=name)

    async def start(
        self,
        make: Callable[[], Engine[RequestT, SampleT]],
        count: int,
        *,
        num_threads: int,
        preload: tuple[str, ...],
        gpus: Sequence[str] = (),
    ) -> Engine[RequestT, SampleT]:
        """Start ``count`` replicas in processes of their own, which log to files; 0: one, in this process.

        See `start_replicas` for the other arguments.
        """
        if not count:
            return self.instrument(make(), 0)
        return await start_replicas(
            lambda place: partial(logged, self.logs, self.role, place, make) if self.logs else make,
            count,
            num_threads=num_threads,
            preload=preload,
            gpus=gpus,
            wrap=self.instrument,
            announce=self.announce,
        )


NO_INSTRUMENTATION = Instrumentation()
