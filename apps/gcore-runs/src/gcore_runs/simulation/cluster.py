"""A job on a simulated cluster, with the records of a run or with the figures of each step alone."""

import asyncio
import gc
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic

from gcore_controller import (
    Context,
    DeviceTimers,
    Event,
    InlineBackend,
    Program,
    Recorder,
    StageTimer,
    Stepped,
    run_simulated,
    share_trainer,
)
from gcore_placement import RunningLedger
from gcore_rollout import InstrumentedEngine, RequestT, SampleT
from gcore_runs.loop.recorder import BaseRunRecorder, RunJob, frozen_objects
from gcore_runs.loop.supervisor import RunResult, Supervisor
from gcore_runs.settings.run_config import BaseRLConfig
from gcore_runs.simulation.config import BaseSimConfig, SimulateConfig
from gcore_runs.simulation.engine import ModelledEngine
from gcore_runs.simulation.services import (
    LoadMeter,
    ModelledLearner,
    ModelledReward,
    SharedState,
    SimulatedModality,
    now_s,
)

if TYPE_CHECKING:
    from gcore_runs.loop.recorder import Display
    from gcore_runs.report.run import Kind


@dataclass(frozen=True, kw_only=True)
class StepSummary:
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
    """Metrics of the program, with lengths in units of ``token_unit`` tokens."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The outcome of a simulation, which took ``wall_s`` real seconds."""

    config: SimulateConfig
    steps: list[StepSummary]
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class SimulatedCluster(Generic[RequestT, SampleT]):
    """The simulation of a job: its program on modelled services."""

    job: RunJob[Any]
    """With the settings of the program."""
    sim: BaseSimConfig
    modality: SimulatedModality[RequestT, SampleT]
    n: int
    """Samples of a prompt."""
    roles: Callable[..., Any]
    """Class of a controller's roles."""
    services: Callable[..., Any]
    """Makes their fields other than the trainer: from the controller's ``policy``, the ``policy_slots`` that this has
    if it is no other's, the ``reward``, and the timers of the ``devices``."""
    has_signal: Callable[[int], bool] | None = None
    """Says of a group's key whether its scores differ, in place of draws."""

    def train(
        self,
        config: BaseRLConfig,
        recorder: Callable[..., BaseRunRecorder[Any, Any]],
        kinds: "Mapping[str, Kind]",
        *,
        app: str,
        display: "Display | None",
    ) -> RunResult:
        """Run the job in a new run folder, as the command train does it: with its records, but without a model."""
        with Supervisor(replace(config, resume="never"), app=app, display=display) as supervisor:
            supervisor.open_run(
                f"simulated: {self.sim.devices:,} devices, on which no model is trained"
            )
            size = config.controllers
            learner, program = self._program(LoadMeter(size), None)
            backend: InlineBackend[Any, Any, Any] = InlineBackend(
                self.job.config,
                roles=None,
                world_size=size,
                learner=learner,
                program=program,
                close_services=partial(asyncio.sleep, 0),
            )
            supervisor.train(backend, self.job, recorder)
            return supervisor.finish(kinds)

    def simulate(self, config: SimulateConfig, report: Callable[[StepSummary], None]) -> Simulation:
        """Run the job of this config outside a run folder; report and return the figures of its steps."""
        start_s = time.perf_counter()
        size = config.controllers
        meter = LoadMeter(config.controllers)
        ledger = RunningLedger(
            num_devices=config.devices,
            num_reward_devices=config.reward.devices,
            num_controllers=size,
            clock=now_s,
        )
        steps: list[StepSummary] = []

        async def record(event: Event) -> None:
            """Keep the figures of a step, and nothing else."""
            if not isinstance(event, Stepped):
                return
            with meter.exclude():
                steps.append(_summarize(event, config, meter, ledger))
                report(steps[-1])
                # Of the objects of this step alone.
                gc.collect(1)

        _, program = self._program(meter, ledger)
        # A garbage collector's pass over a whole simulated cluster is not one controller's load: `stepped` makes them.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with frozen_objects():
                run_simulated(program(self.job, record), roles=None, world_size=size)
        finally:
            if was_enabled:
                gc.enable()
        return Simulation(config=config, steps=steps, wall_s=time.perf_counter() - start_s)

    def _program(
        self, meter: LoadMeter, ledger: RunningLedger | None
    ) -> tuple[ModelledLearner, Callable[[RunJob[Any], Recorder], Program[Any, None]]]:
        """Return the trainer, and what makes a job's program; the ledger counts work, or timers do."""
        state = SharedState(
            config=self.sim,
            modality=self.modality,
            seed=self.job.config.seed,
            meter=meter,
            ledger=ledger,
        )
        learner = ModelledLearner(state)
        devices = DeviceTimers(now_s, wall_clock=now_s)
        reward = ModelledReward(state, self.n, self.has_signal).runner()
        own_roles: list[Any] = []
        for rank, (engine, slots) in enumerate(self._engines(state)):
            name = f"engine {rank}"
            policy = engine if ledger else InstrumentedEngine(engine, name=name, timers=devices)
            own_roles.append(
                self.services(policy=policy, policy_slots=slots, reward=reward, devices=devices)
            )
        num_ranks = 0 if ledger else learner.num_replicas

        def program(job: RunJob[Any], recorder: Recorder) -> Program[Any, None]:
            run = share_trainer(
                learner, job.program(recorder), roles=self.roles, num_ranks=num_ranks
            )

            async def run_own(ctx: Context[Any]) -> None:
                timer = _LedgerTimer(ctx.rank, ledger) if ledger else ctx.timer
                await meter.run(
                    ctx.rank,
                    run(replace(ctx, roles=own_roles[ctx.rank], timer=timer, wall_clock=now_s)),
                )

            return run_own

        return learner, program

    def _engines(
        self, state: SharedState[RequestT, SampleT]
    ) -> list[tuple[ModelledEngine[Any, Any], int | None]]:
        """Return the engine of each controller, and the samples that it generates at once if it is its own."""
        size = self.job.config.controllers
        num_replicas = self.sim.num_engine_replicas
        model = self.sim.engine
        if model.prompts == "shared":
            return [(ModelledEngine(state, num_replicas), None)] * size
        counts = [len(range(rank, num_replicas, size)) for rank in range(size)]
        slots = model.max_num_seqs if model.prompts == "stealing" else None
        return [(ModelledEngine(state, count), slots and count * slots) for count in counts]


def _summarize(
    event: Stepped, config: SimulateConfig, meter: LoadMeter, ledger: RunningLedger
) -> StepSummary:
    metrics = event.metrics
    step_s = metrics["timing_s/step"]
    return StepSummary(
        step=event.step,
        step_s=step_s,
        num_tokens=metrics.get("perf/total_num_tokens", 0.0) * config.token_unit,
        device_s=ledger.cut(),
        controller_load=[busy_s / step_s if step_s > 0 else 0.0 for busy_s in meter.cut()],
        metrics=metrics,
    )


class _LedgerTimer(StageTimer):
    """A controller's stage timer that notes each stage in the ledger."""

    def __init__(self, rank: int, ledger: RunningLedger) -> None:
        super().__init__(now_s)
        self._rank = rank
        self._ledger = ledger

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        try:
            with super().stage(name):
                self._ledger.enter(self._rank, name)
                yield
        finally:
            self._ledger.enter(self._rank, self.current)
