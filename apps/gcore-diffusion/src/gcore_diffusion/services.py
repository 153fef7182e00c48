"""The backend of a run of gcore-diffusion in this process."""

from pathlib import Path

from gcore_controller import (
    InlineBackend,
    InProcessTrainerGroup,
    Program,
    Recorder,
    share_trainer,
)
from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.learning.trainer_worker import DiffusionTrainerWorker
from gcore_diffusion.modality import Job, diffusion_program
from gcore_diffusion.roles import Roles, SamplingRoles
from gcore_diffusion.sampling.engines import Engines
from gcore_diffusion.sampling.evaluate import Evaluation
from gcore_diffusion.sampling.rewards import reward_gradient


def inline_backend(
    config: DiffusionConfig, sampler: SamplingRoles, engines: Engines, model: Path, checkpoints: Path
) -> InlineBackend[Job, DiffusionConfig, SamplingRoles, Evaluation]:
    """Load the models in training, and return the backend.

    Args:
        config: the run's.
        sampler: generates and scores images.
        engines: those of the sampler, which the backend closes.
        model: folder of the pipeline.
        checkpoints: folder of the checkpoints.
    """
    worker = DiffusionTrainerWorker(config, model, checkpoints, reward=reward_gradient(config))
    learner = InProcessTrainerGroup(worker, in_thread=True)

    def program(job: Job, recorder: Recorder[Evaluation]) -> Program[SamplingRoles, None]:
        return share_trainer(learner, diffusion_program(job, recorder), roles=Roles, num_ranks=1)

    return InlineBackend(
        config, roles=sampler, world_size=config.controllers, learner=learner, program=program, close=engines.close
    )
