"""The backend of a run of gcore-llm in this process."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore_controller import (
    Context,
    DeviceTimers,
    InlineBackend,
    Program,
    Recorder,
    SharedTrainerGroup,
    share_trainer,
)
from gcore_llm.config import TrainConfig
from gcore_llm.data.prompts import PromptSets
from gcore_llm.learning.trainer_worker import start_trainer
from gcore_llm.modality import Job
from gcore_llm.roles import EnvironmentRole, Roles, SamplingRoles, build_engine
from gcore_llm.sampling.evaluate import Evaluation
from gcore_llm.sampling.rewards import Rewards
from gcore_runs.logs import logs_of
from gcore_runs.loop.instrumented_engine import Instrumentation
from gcore_trainer import MicroBatch

if TYPE_CHECKING:
    from gcore_runs.prometheus import PrometheusExporter


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs of a run besides its models, which were checked before it started."""

    config: TrainConfig
    tokenizer: Any
    prompts: PromptSets
    rewards: Rewards
    environment: EnvironmentRole | None
    devices: DeviceTimers
    """Timers of the rewards' devices."""
    prometheus: "PrometheusExporter | None" = None
    announce: Callable[[str], None] | None = None
    """Prints a line on the screen."""


async def start_inline(
    inputs: Inputs, model: Path, checkpoints: Path
) -> InlineBackend[Job, TrainConfig, SamplingRoles, Evaluation]:
    """Load the model for every role that needs it."""
    config = inputs.config
    # vLLM sets process-wide state as it starts, so it comes first.
    instrumentation = Instrumentation(devices=inputs.devices, logs=logs_of(checkpoints), announce=inputs.announce)
    policy = await build_engine(config, model, inputs.tokenizer, instrumentation=instrumentation)
    try:
        learner = start_trainer(config, model, checkpoints)
    except BaseException:
        await policy.close()
        raise
    sampler = SamplingRoles(
        policy=policy,
        reward=inputs.rewards.runner,
        comparison=inputs.rewards.comparison,
        tokenizer=inputs.tokenizer,
        environment=inputs.environment,
        devices=inputs.devices,
    )

    def program(job: Job, recorder: Recorder[Evaluation]) -> Program[SamplingRoles, None]:
        return sharing(learner, job.program(recorder), num_ranks=config.trainer.num_processes)

    return InlineBackend(
        config, roles=sampler, world_size=config.controllers, learner=learner, program=program, close=policy.close
    )


def sharing(
    learner: SharedTrainerGroup[MicroBatch], program: Program[Roles, None], *, num_ranks: int = 0
) -> Callable[[Context[SamplingRoles]], Coroutine[Any, Any, None]]:
    """See `share_trainer`."""
    return share_trainer(learner, program, roles=Roles, num_ranks=num_ranks)
