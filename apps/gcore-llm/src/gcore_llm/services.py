"""What runs a job in this process."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from gcore_controller import Context, DeviceTimers, Program, Recorder
from gcore_llm.config import TrainConfig
from gcore_llm.evaluate import Evaluation
from gcore_llm.learner import Learner
from gcore_llm.learner_part import SharedLearner
from gcore_llm.modality import Job, rlhf_program
from gcore_llm.prompts import PromptSets
from gcore_llm.rewards import Rewards
from gcore_llm.roles import EnvironmentRole, Roles, SamplingRoles, build_engine, build_learner
from gcore_runs.logs import logs_of
from gcore_runs.services import InlineServices
from gcore_runs.watched import Watched

if TYPE_CHECKING:
    from gcore_runs.prometheus import PrometheusExporter


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run is given beside its models; found to be in order before it begins."""

    config: TrainConfig
    tokenizer: Any
    prompts: PromptSets
    rewards: Rewards
    environment: EnvironmentRole | None
    devices: DeviceTimers
    """What the rewards note their work with."""
    prometheus: "PrometheusExporter | None" = None
    announce: Callable[[str], None] | None = None
    """Puts a line on the screen."""


class LocalServices(InlineServices[TrainConfig, SamplingRoles]):
    """Everything belongs to this process; made by `start`."""

    def __init__(self, config: TrainConfig, sampler: SamplingRoles, learner: Learner) -> None:
        super().__init__(config, sampler)
        self._learner = learner
        self._policy = sampler.policy

    @classmethod
    async def start(cls, inputs: Inputs, model: Path, checkpoints: Path) -> Self:
        """Load the model for every role that needs it."""
        # vLLM sets process-wide state as it starts, so it comes first.
        watched = Watched(devices=inputs.devices, logs=logs_of(checkpoints), announce=inputs.announce)
        policy = await build_engine(inputs.config, model, inputs.tokenizer, watched=watched)
        try:
            learner = build_learner(inputs.config, model, checkpoints)
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
        return cls(inputs.config, sampler, learner)

    @property
    def learner(self) -> Learner:
        """See `Services.learner`."""
        return self._learner

    async def run(self, job: Job, recorder: Recorder[Evaluation]) -> None:
        """See `Services.run`."""
        num_ranks = job.config.trainer.num_processes
        await self.run_program(sharing(self._learner, rlhf_program(job, recorder), num_ranks=num_ranks))

    async def _close_engines(self) -> None:
        await self._policy.close()


def sharing(
    learner: Learner, program: Program[Roles, None], *, num_ranks: int = 0
) -> Callable[[Context[SamplingRoles]], Coroutine[Any, Any, None]]:
    """The program, on controllers that all have one sampler and one learner.

    Args:
        num_ranks: of the learner, whose work is noted.
    """

    async def run(ctx: Context[SamplingRoles]) -> None:
        part = SharedLearner(learner, ctx.group, ctx.roles.devices, num_ranks=num_ranks)
        await program(ctx.with_roles(Roles(**vars(ctx.roles), learner=part)))

    return run
