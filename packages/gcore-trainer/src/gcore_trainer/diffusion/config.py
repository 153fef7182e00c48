"""Settings of diffusion objectives. Names are Flow-GRPO's and DiffusionNFT's where they have the thing."""

from dataclasses import dataclass
from typing import Literal

from gcore_trainer.config import (
    ABOVE_ZERO,
    AT_LEAST_1,
    BELOW_ONE,
    FRACTION,
    NOT_NEGATIVE,
    Bound,
    one_of,
    require_bounds,
)

DiffusionLossMode = Literal["vanilla", "guard"]


@dataclass(frozen=True, kw_only=True)
class DenoisingPolicyConfig:
    """DDPO, Flow-GRPO and GRPO-Guard: policy gradients of the steps that a sampler drew."""

    loss_mode: DiffusionLossMode = "vanilla"
    """PPO's clipped ratio (vanilla), or with the ratio's bias and scale taken out of it (guard)."""
    clip_ratio: float = 1e-4
    """The ratio is clipped to 1 +- clip_ratio. It is of a mean over the latents' dimensions, which is why it is small:
    1e-4 to 1e-5 for images of 512 pixels, 1e-3 to 1e-2 for very small ones."""
    kl_loss_coef: float = 0.0
    """Weight of the KL divergence to the reference, of the Gaussians themselves; 0 needs no reference."""

    def __post_init__(self) -> None:
        within = Bound(lambda v: 0 < v < 1, "a number in (0, 1)")
        require_bounds(self, loss_mode=one_of(DiffusionLossMode), clip_ratio=within, kl_loss_coef=NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class NFTConfig:
    """DiffusionNFT (arXiv 2509.16117): the forward process is trained towards good images and away from bad ones."""

    beta: float = 0.1
    """Distance of the implicit policies from the old one; in (0, 1]."""
    num_timesteps: int = 4
    """Noise levels drawn for each image and update."""
    adv_clip_max: float = 5.0
    """Advantages of +- this much are the best and the worst there can be."""
    kl_loss_coef: float = 0.0
    """Weight of the squared distance to the reference's velocity; 0 needs no reference."""
    old_decay: float = 0.001
    """Growth a step of the fraction that the old policy keeps of itself at an update."""
    old_decay_max: float = 0.5
    """Largest such fraction."""

    def __post_init__(self) -> None:
        require_bounds(
            self,
            beta=Bound(lambda v: 0 < v <= 1, "a number in (0, 1]"),
            num_timesteps=AT_LEAST_1,
            adv_clip_max=ABOVE_ZERO,
            kl_loss_coef=NOT_NEGATIVE,
            old_decay=FRACTION,
            old_decay_max=BELOW_ONE,
        )


@dataclass(frozen=True, kw_only=True)
class DiffusionDPOConfig:
    """Diffusion-DPO (arXiv 2311.12908)."""

    beta: float = 2000.0
    """Strength of the pull to the reference."""
    num_timesteps: int = 1
    """Noise levels drawn for each pair and update."""

    def __post_init__(self) -> None:
        require_bounds(self, beta=ABOVE_ZERO, num_timesteps=AT_LEAST_1)
