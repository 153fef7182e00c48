"""Settings of diffusion objectives, and their losses by name. Names are Flow-GRPO's where it has the thing."""

from dataclasses import dataclass
from typing import Annotated, Literal

from gcore_trainer.config import CheckedConfig, ConfigBound, NotNegative, Registry

DENOISING_LOSSES = Registry("gcore_trainer.losses.denoising", "loss")
FORWARD_LOSSES = Registry("gcore_trainer.losses.forward", "loss")


@dataclass(frozen=True, kw_only=True)
class DenoisingPolicyConfig(CheckedConfig):
    """Policy gradients of the steps that a sampler drew: DDPO, Flow-GRPO, GRPO-Guard and Flow-DPPO.

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
