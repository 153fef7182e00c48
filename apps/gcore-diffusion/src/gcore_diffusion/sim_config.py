"""Settings of the simulated cluster of an image model."""

from dataclasses import dataclass, field

from gcore_runs.settings.run_config import Positive
from gcore_runs.simulation.config import BaseSimConfig, EngineModel


@dataclass(frozen=True, kw_only=True)
class SimConfig(BaseSimConfig):
    """See `BaseSimConfig`; what is generated is images, of Stable Diffusion 3.5 medium at 512 x 512 by default."""

    parameters: Positive = 2.2e9
    """Parameters of the denoiser."""
    tokens: Positive = 1357
    """Tokens of an image and its prompt, in a pass of the denoiser."""
    engine: EngineModel = field(
        default_factory=lambda: EngineModel(devices_per_replica=1, max_num_seqs=16, per_sample_s=0.012)
    )
