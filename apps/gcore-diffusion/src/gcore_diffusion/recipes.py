"""Recipes of `gcore-diffusion train`: functions that return settings to start from."""

from collections.abc import Callable
from dataclasses import replace

from gcore_diffusion.config import (
    ActorConfig,
    AlgorithmConfig,
    DataConfig,
    DiffusionConfig,
    RolloutConfig,
)
from gcore_diffusion.sampling.reward_config import RewardConfig
from gcore_trainer import DenoisingPolicyConfig, OptimizerConfig


def embedded() -> DiffusionConfig:
    """Under four minutes on two cores: Flow-GRPO-Fast teaches a tiny model to draw legible digits."""
    return DiffusionConfig(
        threads=1,
        data=DataConfig(train_batch_size=16),
        reward=RewardConfig(kind="digit", held_out="colour"),
        rollout=RolloutConfig(
            n=16, num_inference_steps=10, window_size=2, max_sequence_length=1, max_num_images=256, eval_n=8
        ),
        actor=ActorConfig(
            optim=OptimizerConfig(lr=3e-4, weight_decay=1e-4),
            # Too small to restrain the policy; the report shows its divergence.
            loss=DenoisingPolicyConfig(clip_ratio=5e-3, kl_loss_coef=1e-4),
        ),
    )


def embedded_nft() -> DiffusionConfig:
    """The same by DiffusionNFT, which needs no noise in sampling."""
    base = embedded()
    return replace(
        base,
        algorithm=AlgorithmConfig(name="nft", filter_groups=False),
        rollout=replace(base.rollout, kernel="ode", window_size=0),
        actor=replace(base.actor, num_updates=1, loss=DenoisingPolicyConfig()),
    )


RECIPES: dict[str, Callable[[], DiffusionConfig]] = {
    "embedded": embedded,
    "embedded_nft": embedded_nft,
    "own_data": DiffusionConfig,
}
