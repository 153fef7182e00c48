"""A simulated cluster: its services, the runtime of the program that uses them, and the figures of each step."""

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from gcore_controller import Context, Span, StageTimer, State, run_simulated
from gcore_placement import RunningLedger
from gcore_rollout import Failure
from gcore_runs.simulation.config import SimulateConfig
from gcore_runs.simulation.engine import ModelledEngine, ModelledWeights
from gcore_runs.simulation.services import (
    CoarseWorkload,
    LoadMeter,
    ModelledLearner,
    ModelledReward,
    Replay,
    weights_bytes,
)
from gcore_trainer import MicroBatch


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """The figures of one step."""

    step: int
    step_s: float
    """Simulated seconds."""
    num_tokens: float
    """Tokens of all responses that were sampled, each with its prompt."""
    device_s: dict[str, float]
    """Device-seconds by column of the ledger; together they are devices times ``step_s``."""
    controller_load: list[float]
    """Real seconds of the processor in each controller's own code for a simulated second, by rank."""
    metrics: dict[str, float]
    """As the program reports them; lengths are in units of ``token_unit`` tokens."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The outcome of a simulation."""

    config: SimulateConfig
    steps: list[StepFigures]
    wall_s: float
    """Real seconds of the whole simulation."""


class SimulatedCluster:
    """The modelled services of a run; it is also the recorder of the program that uses them.

    Args:
        workload: FLOPs of the model in units of ``token_unit`` tokens.
        cost_of: returns the FLOPs of a micro-batch.
        report: called after every step.
        replay: gives the lengths of responses, and the groups whose scores differ, in place of draws.
    """

    def __init__(
        self,
        config: SimulateConfig,
        workload: CoarseWorkload,
        *,
        cost_of: Callable[[MicroBatch], float],
        report: Callable[[StepFigures], None],
        replay: Replay | None = None,
    ) -> None:
        self._start_s = time.perf_counter()
        self._config, self._report, self._replay = config, report, replay
        self._ledger = RunningLedger(
            num_devices=config.devices,
            num_reward_devices=config.reward.devices,
            num_controllers=config.controllers,
            clock=lambda: asyncio.get_running_loop().time(),
        )
        self._meter = LoadMeter(config.controllers)
        self._weights = ModelledWeights()
        self._sync_s = weights_bytes(workload) / (config.learner.sync_gb_per_s * 1e9)
        self._steps: list[StepFigures] = []
        self.reward = ModelledReward(config, ledger=self._ledger, meter=self._meter, replay=replay).runner()
        self.learner = ModelledLearner(config, cost_of, ledger=self._ledger, meter=self._meter)

    def engines(self) -> list[tuple[ModelledEngine, int | None]]:
        """Return the engine of each controller, and the responses that it generates at once if it is its own."""
        size, num_replicas, prompts = self._config.controllers, self._config.num_engine_replicas, self._config.engine
        if prompts.prompts == "shared":
            return [(self._engine(num_replicas), None)] * size
        counts = [len(range(rank, num_replicas, size)) for rank in range(size)]
        slots = prompts.max_num_seqs if prompts.prompts == "stealing" else None
        return [(self._engine(count), slots and count * slots) for count in counts]

    def _engine(self, num_replicas: int) -> ModelledEngine:
        return ModelledEngine(
            self._config,
            num_replicas=num_replicas,
            weights=self._weights,
            sync_s=self._sync_s,
            ledger=self._ledger,
            meter=self._meter,
            replay=self._replay,
        )

    def run(self, program: Callable[[Context[Any]], Coroutine[Any, Any, None]], roles: Sequence[Any]) -> Simulation:
        """Run the program, whose recorder this object is, on the roles of each rank."""

        async def metered(ctx: Context[Sequence[Any]]) -> None:
            own = replace(ctx.with_roles(ctx.roles[ctx.rank]), timer=_LedgerTimer(ctx.rank, self._ledger))
            await self._meter.run(ctx.rank, program(own))

        # A garbage collector's pass over a whole simulated cluster is not one controller's load: `stepped` makes them.
        was_enabled = gc.isenabled()
        gc.disable()
        gc.freeze()
        try:
            run_simulated(metered, roles=roles, world_size=self._config.controllers)
        finally:
            gc.unfreeze()
            if was_enabled:
                gc.enable()
        return Simulation(config=self._config, steps=self._steps, wall_s=time.perf_counter() - self._start_s)

    async def stepped(
        self, step: int, metrics: dict[str, float], spans: list[list[Span]], devices: dict[str, list[Span]]
    ) -> None:
        """Record the figures of a step."""
        del spans, devices
        with self._meter.paused():
            step_s = metrics["timing_s/step"]
            figures = StepFigures(
                step=step,
                step_s=step_s,
                num_tokens=metrics.get("perf/total_num_tokens", 0.0) * self._config.token_unit,
                device_s=self._ledger.cut(),
                controller_load=[busy_s / step_s for busy_s in self._meter.cut()],
                metrics=metrics,
            )
            self._steps.append(figures)
            self._report(figures)
            gc.collect()

    async def evaluated(self, step: int, evaluation: Any) -> None:
        """Do nothing: there are no held-out prompts."""

    async def updating(self) -> None:
        """Do nothing: a simulation is not interrupted."""

    async def rewards_failed(self, step: int, failures: list[Failure]) -> None:
        """Do nothing: the simulated reward does not fail."""

    async def reached(self, step: int, controllers: list[State]) -> None:
        """Do nothing: a simulation takes no checkpoint."""


class _LedgerTimer(StageTimer):
    """A controller's stage timer that notes each stage in the ledger."""

    def __init__(self, rank: int, ledger: RunningLedger) -> None:
        super().__init__(asyncio.get_running_loop().time)
        self._rank, self._ledger = rank, ledger

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        try:
            with super().stage(name):
                self._ledger.enter(self._rank, name)
                yield
        finally:
            self._ledger.enter(self._rank, self.current)
