"""A whole simulation: services, the program that uses them, and the figures of each step."""

import asyncio
import gc
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from gcore_controller import Context, Span, StageTimer, State, run_simulated
from gcore_llm.modality import Job
from gcore_llm.roles import SamplingRoles
from gcore_llm.sampling.evaluate import Evaluation
from gcore_llm.services import sharing
from gcore_llm.simulate.config import SimulateConfig
from gcore_llm.simulate.engine import ModelledEngine, ModelledWeights
from gcore_llm.simulate.learner import ModelledLearner
from gcore_llm.simulate.load import LoadMeter
from gcore_llm.simulate.replay import Replay
from gcore_llm.simulate.reward import ModelledReward
from gcore_llm.simulate.work import SampleNames, coarse_workload, make_prompts, weights_bytes
from gcore_placement import RunningLedger
from gcore_rollout import Failure


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


def simulate(
    config: SimulateConfig,
    stepped: Callable[[StepFigures], None] = lambda _: None,
    *,
    replay: Replay | None = None,
) -> Simulation:
    """Run the program of `train` on modelled services.

    Args:
        stepped: called after every step.
        replay: gives the lengths of responses, and the groups whose scores differ, in place of draws.

    Raises:
        UserError: the model folder has no config.json that loads.
    """
    start_s = time.perf_counter()
    workload = coarse_workload(config)
    ledger = RunningLedger(
        num_devices=config.devices,
        num_reward_devices=config.reward.devices,
        num_controllers=config.controllers,
        clock=lambda: asyncio.get_running_loop().time(),
    )
    meter = LoadMeter(config.controllers)
    sync_s = weights_bytes(workload) / (config.learner.sync_gb_per_s * 1e9)
    weights = ModelledWeights()
    reward = ModelledReward(config, ledger=ledger, meter=meter, replay=replay).runner()

    def sampler(num_replicas: int) -> SamplingRoles:
        policy = ModelledEngine(
            config,
            num_replicas=num_replicas,
            weights=weights,
            sync_s=sync_s,
            ledger=ledger,
            meter=meter,
            replay=replay,
        )
        slots = num_replicas * config.engine.max_num_seqs if config.engine.prompts == "stealing" else None
        return SamplingRoles(policy=policy, policy_slots=slots, reward=reward, tokenizer=SampleNames())

    def samplers() -> list[SamplingRoles]:
        """Return the samplers by rank."""
        num_replicas, size = config.num_engine_replicas, config.controllers
        if config.engine.prompts == "shared":
            return [sampler(num_replicas)] * size
        return [sampler(len(range(rank, num_replicas, size))) for rank in range(size)]

    learner = ModelledLearner(config, workload, ledger=ledger, meter=meter)
    recorder = _Recorder(config=config, ledger=ledger, meter=meter, report=stepped)
    job = Job(
        config=config.train_config(),
        prompts=make_prompts(config),
        workload=workload,
        first_step=0,
        is_evaluated=True,
        controllers=None,
        is_policy_behind=False,
    )
    real = sharing(learner, job.program(recorder))

    async def program(ctx: Context[Sequence[SamplingRoles]]) -> None:
        own = ctx.with_roles(ctx.roles[ctx.rank])
        await meter.run(ctx.rank, real(replace(own, timer=_LedgerTimer(ctx.rank, ledger))))

    with _garbage_collected_by_step():
        run_simulated(program, roles=samplers(), world_size=config.controllers)
    return Simulation(config=config, steps=recorder.steps, wall_s=time.perf_counter() - start_s)


@contextmanager
def _garbage_collected_by_step() -> Generator[None]:
    """Leave garbage collection to the recorder: a pass over a whole simulated cluster is not one controller's load."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


class _LedgerTimer(StageTimer):
    """A controller's stage timer that notes each stage in the ledger."""

    def __init__(self, rank: int, ledger: RunningLedger) -> None:
        super().__init__(asyncio.get_running_loop().time)
        self._rank = rank
        self._ledger = ledger

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """See `StageTimer.stage`."""
        try:
            with super().stage(name):
                self._ledger.enter(self._rank, name)
                yield
        finally:
            self._ledger.enter(self._rank, self.current)


@dataclass(kw_only=True)
class _Recorder:
    """Records the figures of every step."""

    config: SimulateConfig
    ledger: RunningLedger
    meter: LoadMeter
    report: Callable[[StepFigures], None]
    steps: list[StepFigures] = field(default_factory=list[StepFigures])

    async def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Do nothing: there are no held-out prompts."""

    async def updating(self) -> None:
        """Do nothing: a simulation is not interrupted."""

    async def rewards_failed(self, step: int, failures: list[Failure]) -> None:
        """Do nothing: the simulated reward does not fail."""

    async def stepped(
        self, step: int, metrics: dict[str, float], spans: list[list[Span]], devices: dict[str, list[Span]]
    ) -> None:
        del spans, devices
        with self.meter.paused():
            step_s = metrics["timing_s/step"]
            figures = StepFigures(
                step=step,
                step_s=step_s,
                num_tokens=metrics.get("perf/total_num_tokens", 0.0) * self.config.token_unit,
                device_s=self.ledger.cut(),
                controller_load=[busy_s / step_s for busy_s in self.meter.cut()],
                metrics=metrics,
            )
            self.steps.append(figures)
            self.report(figures)
            gc.collect()

    async def reached(self, step: int, controllers: list[State]) -> None:
        """Do nothing: a simulation takes no checkpoint."""
