"""What runs a job in this process."""

from pathlib import Path

from gcore_controller import Context, Recorder
from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.engines import Engines
from gcore_diffusion.evaluate import Evaluation
from gcore_diffusion.learner import Learner, SharedLearner
from gcore_diffusion.modality import Job, diffusion_program
from gcore_diffusion.rewards import reward_gradient
from gcore_diffusion.roles import Roles, SamplingRoles
from gcore_runs.services import InlineServices


class LocalServices(InlineServices[DiffusionConfig, SamplingRoles]):
    """Everything belongs to this process, but for engines that are processes of their own.

    Args:
        config: the run's.
        sampler: what makes and scores images.
        engines: its, to be closed in the end.
        model: the pipeline's folder.
        checkpoints: where checkpoints are.
    """

    def __init__(
        self, config: DiffusionConfig, sampler: SamplingRoles, engines: Engines, model: Path, checkpoints: Path
    ) -> None:
        super().__init__(config, sampler)
        self._learner = Learner(config, model, checkpoints, reward=reward_gradient(config))
        self._engines = engines

    @property
    def learner(self) -> Learner:
        """See `Services.learner`."""
        return self._learner

    async def run(self, job: Job, recorder: Recorder[Evaluation]) -> None:
        """See `Services.run`."""
        program = diffusion_program(job, recorder)

        async def controller(ctx: Context[SamplingRoles]) -> None:
            part = SharedLearner(self._learner, ctx.group, ctx.roles.devices)
            await program(ctx.with_roles(Roles(**vars(ctx.roles), learner=part)))

        await self.run_program(controller)

    async def _close_engines(self) -> None:
        await self._engines.close()
