"""What runs a job in this process."""

from collections.abc import Sequence
from pathlib import Path

from gcore_controller import Context, StageTimer, run_inline
from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.engines import Engines
from gcore_diffusion.evaluate import Evaluation
from gcore_diffusion.learner import Learner, SharedLearner
from gcore_diffusion.program import Job, diffusion_program
from gcore_diffusion.rewards import reward_gradient
from gcore_diffusion.roles import Roles, Sampler
from gcore_runs.recording import Recorder
from gcore_runs.services import Recovery


class InlineServices:
    """Everything belongs to this process, but for engines that are processes of their own.

    Args:
        config: the run's.
        sampler: what makes and scores images.
        engines: its, to be closed in the end.
        model: the pipeline's folder.
        checkpoints: where checkpoints are.
    """

    def __init__(
        self, config: DiffusionConfig, sampler: Sampler, engines: Engines, model: Path, checkpoints: Path
    ) -> None:
        self.config = config
        self.learner = Learner(config, model, checkpoints, reward=reward_gradient(config))
        self._sampler = sampler
        self._engines = engines
        self._timers: dict[int, StageTimer] = {}

    @property
    def shortfall(self) -> str:
        """See `Services.shortfall`; this process has room for all."""
        return ""

    async def run(self, job: Job, recorder: Recorder[Evaluation]) -> None:
        """See `Services.run`."""
        program = diffusion_program(job, recorder)

        async def controller(ctx: Context[Sampler]) -> None:
            self._timers[ctx.rank] = ctx.timer
            part = SharedLearner(self.learner, ctx.group, ctx.roles.devices)
            await program(ctx.with_roles(Roles(**vars(ctx.roles), learner=part)))

        await run_inline(controller, roles=self._sampler, world_size=self.config.controllers)

    def stages(self) -> Sequence[str | None]:
        """See `Services.stages`."""
        return [timer.current for _, timer in sorted(self._timers.items())]

    async def recover(self, error: Exception, *, keeps_models: bool) -> Recovery:
        """See `Services.recover`; replicas of engines are replaced while the program runs, and nothing else is."""
        del keeps_models
        raise error

    async def close(self) -> None:
        """See `Services.close`."""
        try:
            self.learner.close()
        finally:
            await self._engines.close()
