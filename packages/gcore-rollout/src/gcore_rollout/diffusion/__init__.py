"""Images: samplers whose steps have log-probabilities, and the engine that runs them in diffusers' pipelines."""

from gcore_rollout.diffusion.kernels import DDIM, DanceSDE, FlowCPS, FlowODE, FlowSDE, Kernel, Transition
from gcore_rollout.diffusion.types import ImageRequest, ImageSample, ImageSampling, Trajectory

__all__ = [
    "DDIM",
    "DanceSDE",
    "FlowCPS",
    "FlowODE",
    "FlowSDE",
    "ImageRequest",
    "ImageSample",
    "ImageSampling",
    "Kernel",
    "Trajectory",
    "Transition",
]
