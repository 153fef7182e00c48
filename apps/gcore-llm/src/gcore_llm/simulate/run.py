"""A whole simulation: services, the program on them, and what each step took."""

import gc
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from gcore_controller import Context, Span, run_simulated
from gcore_llm.evaluate import Evaluation
from gcore_llm.program import Job, rlhf_program
from gcore_llm.roles import Sampler
from gcore_llm.sampling import State
from gcore_llm.services import sharing
from gcore_llm.simulate.config import SimulateConfig
from gcore_llm.simulate.engine import ModelledEngine, ModelledWeights
from gcore_llm.simulate.learner import ModelledLearner
from gcore_llm.simulate.load import LoadMeter
from gcore_llm.simulate.replay import Replay
from gcore_llm.simulate.reward import ModelledReward
from gcore_llm.simulate.work import SampleNames, coarse_workload, make_prompts, weights_bytes
from gcore_placement.simulation.running_ledger import Ledger, WatchedTimer
from gcore_rollout import Failure


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """One step."""

    step: int
    step_s: float
    """Simulated seconds."""
    num_tokens: float
    """Of all responses that were sampled, each with its prompt."""
    device_s: dict[str, float]
    """Device-seconds by column of the ledger; together they are devices times ``step_s``."""
    controller_load: list[float]
    """Real seconds of the processor in each controller's own code for a simulated second, by rank."""
    metrics: dict[str, float]
    """As the program reports them; lengths are in units of ``token_unit`` tokens."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What came of a run."""

    config: SimulateConfig
    steps: list[StepFigures]
    wall_s: float
    """Real seconds that it took."""


def simulate(
    config: SimulateConfig,
    stepped: Callable[[StepFigures], None] = lambda _: None,
    *,
    replay: Replay | None = None,
) -> Simulation:
    """Run the program of `train` on modelled services.

    Args:
        stepped: called after every step.
        replay: what gives lengths of responses, and which groups have scores that differ, in the place of draws.

    Raises:
        UserError: the model folder does not do.
    """
    start_s = time.perf_counter()
    workload = coarse_workload(config)
    ledger = Ledger(
        num_devices=config.devices, num_reward_devices=config.reward.devices, num_controllers=config.controllers
    )
    meter = LoadMeter(config.controllers)
    sync_s = weights_bytes(workload) / (config.learner.sync_gb_per_s * 1e9)
    weights = ModelledWeights()
    reward = ModelledReward(config, ledger=ledger, meter=meter, replay=replay).runner()

    def sampler(num_replicas: int) -> Sampler:
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
        return Sampler(policy=policy, policy_slots=slots, reward=reward, tokenizer=SampleNames())

    def samplers() -> list[Sampler]:
        """By rank."""
        num_replicas, size = config.num_engine_replicas, config.controllers
        if config.engine.prompts == "shared":
            return [sampler(num_replicas)] * size
        return [sampler(len(range(rank, num_replicas, size))) for rank in range(size)]

    learner = ModelledLearner(config, workload, ledger=ledger, meter=meter)
    recorder = _Recorder(config=config, ledger=ledger, meter=meter, told=stepped)
    job = Job(
        config=config.train_config(),
        prompts=make_prompts(config),
        workload=workload,
        first_step=0,
        is_evaluated=True,
        controllers=None,
        is_policy_behind=False,
    )
    real = sharing(learner, rlhf_program(job, recorder))

    async def program(ctx: Context[Sequence[Sampler]]) -> None:
        own = ctx.with_roles(ctx.roles[ctx.rank])
        await meter.run(ctx.rank, real(replace(own, timer=WatchedTimer(ctx.rank, ledger))))

    with _garbage_collected_by_step():
        run_simulated(program, roles=samplers(), world_size=config.controllers)
    return Simulation(config=config, steps=recorder.steps, wall_s=time.perf_counter() - start_s)


@contextmanager
def _garbage_collected_by_step() -> Generator[None]:
    """Only the recorder collects: a pass over all that a simulated cluster holds is no load of one controller's."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


@dataclass(kw_only=True)
class _Recorder:
    """Takes the figures of every step."""

    config: SimulateConfig
    ledger: Ledger
    meter: LoadMeter
    told: Callable[[StepFigures], None]
    steps: list[StepFigures] = field(default_factory=list[StepFigures])

    async def evaluated(self, step: int, evaluation: Evaluation) -> None:
        """Without held-out prompts there is nothing to note."""

    async def updating(self) -> None:
        """No one interrupts."""

    async def rewards_failed(self, step: int, failures: list[Failure]) -> None:
        """The simulated reward does not fail."""

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
            self.told(figures)
            gc.collect()

    async def reached(self, step: int, controllers: list[State]) -> None:
        """No checkpoint is taken."""
