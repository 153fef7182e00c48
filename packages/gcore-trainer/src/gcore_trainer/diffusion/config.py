"""Settings of diffusion objectives. Names are Flow-GRPO's and DiffusionNFT's where they have the thing."""

from dataclasses import dataclass
from typing import Annotated, Literal

from gcore_trainer.config import (
    BELOW_ONE,
    AboveZero,
    CheckedConfig,
    ConfigBound,
    Count,
    Fraction,
    NotNegative,
)


@dataclass(frozen=True, kw_only=True)
class DenoisingPolicyConfig(CheckedConfig):
    """DDPO, Flow-GRPO and GRPO-Guard: policy gradients of the steps that a sampler drew.

    Example:
        >>> DenoisingPolicyConfig(clip_ratio=2e-6, kl_loss_coef=0.04).kl_loss_type
        'gaussian'
    """

    clip_ratio: Annotated[float, ConfigBound(lambda v: 0 < v < 1, "a number in (0, 1)")] = 1e-4
    """The ratio is clipped to 1 +- clip_ratio. It is of a mean over the latents' dimensions, which is why it is small:
    1e-3 to 1e-2 for very small images. Published for 512 pixels and more: 1e-4 (Flow-GRPO, MixGRPO) and 1e-5
    (Flow-GRPO-Fast) with flow_sde, 1e-4 with dance_sde, 1e-4 to 1e-5 with cps, 2e-6 to 4e-6 of GRPO-Guard."""
    kl_loss_coef: NotNegative = 0.0
    """Weight of the KL divergence to the reference, whose form is ``kl_loss_type``; 0 needs no reference."""
    kl_loss_type: Literal["gaussian", "flow_grpo"] = "gaussian"
    """gaussian: the divergence of the Gaussians themselves, (m - m_ref)^2 / 2 std^2 with std = g sqrt(-dt); flow_grpo:
    (m - m_ref)^2 / 2 g^2, as in Flow-GRPO's code for images, which is |dt| times that. A coefficient b for flow_grpo is
    b |dt| for gaussian, about b / num_inference_steps. For kernels of an SDE: flow_sde and dance_sde."""


@dataclass(frozen=True, kw_only=True)
class NFTConfig(CheckedConfig):
    """DiffusionNFT (arXiv 2509.16117): the forward process is trained towards good images and away from bad ones.

    Example:
        >>> NFTConfig(beta=1.0, num_timesteps=8).old_decay_max
        0.5
    """

    beta: Annotated[float, ConfigBound(lambda v: 0 < v <= 1, "a number in (0, 1]")] = 0.1
    """Distance of the implicit policies from the old one; in (0, 1]."""
    num_timesteps: Count = 4
    """Noise levels drawn for each image and update."""
    kl_loss_coef: NotNegative = 0.0
    """Weight of the squared distance to the reference's velocity; 0 needs no reference."""
    old_decay: Fraction = 0.001
    """Growth a step of the fraction that the old policy keeps of itself at an update."""
    old_decay_max: Annotated[float, BELOW_ONE] = 0.5
    """Largest such fraction."""


@dataclass(frozen=True, kw_only=True)
class DiffusionDPOConfig(CheckedConfig):
    """Diffusion-DPO (arXiv 2311.12908).

    Example:
        >>> DiffusionDPOConfig(beta=5000.0).num_timesteps
        1
    """

    beta: AboveZero = 2000.0
    """Strength of the pull to the reference."""
    num_timesteps: Count = 1
    """Noise levels drawn for each pair and update."""
