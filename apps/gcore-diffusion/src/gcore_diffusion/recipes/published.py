"""Recipes of the models that users start with, on 8 to 32 GPUs, with hyperparameters of published configurations.

Each controller has one GPU more for the reward (`ray.gpus_per_reward_model`).

`model`, the reward's weights and prompts are names of local folders and files to bring: give others by `--model`,
`--reward.path` and `--data.train-files`. The prompts are one in a line, as in Flow-GRPO's dataset/pickscore.

The batches are the published ones; each is divided among the ranks that there are. Where gcore differs: passes are in
bfloat16; of the recorded steps a share is drawn for each batch, where the published code leaves out the last one; the
average of the weights moves at every update, by a decay that averages over as many of them (0.9 at every eighth).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gcore_diffusion.config import (
    DiffusionActorConfig,
    DiffusionAlgorithmConfig,
    DiffusionConfig,
    DiffusionDataConfig,
    DiffusionOptimConfig,
    DiffusionRolloutConfig,
    DiffusionTrainerConfig,
)
from gcore_diffusion.reward_config import RewardConfig
from gcore_trainer import DenoisingPolicyConfig

_ATTENTION = (
    "attn.to_q",
    "attn.to_k",
    "attn.to_v",
    "attn.to_out.0",
    "attn.add_q_proj",
    "attn.add_k_proj",
    "attn.add_v_proj",
    "attn.to_add_out",
)
_EMA_DECAY = 0.987


def sd3_5_medium_pickscore() -> DiffusionConfig:
    """Stable Diffusion 3.5 medium on PickScore, adapters, on 8 GPUs. Planned only; no GPU has run it.

    Hyperparameters: Flow-GRPO's config/grpo.py, `pickscore_sd3`, for 32 GPUs; adapters: its scripts/train_sd3.py.
    """
    return _pickscore(
        "stable-diffusion-3.5-medium",
        num_gpus=8,
        prompts=48,
        rollout=DiffusionRolloutConfig(
            n=24,
            num_inference_steps=10,
            guidance_scale=4.5,
            noise_level=0.7,
            max_sequence_length=128,
            max_num_images=24,
            eval_num_inference_steps=40,
        ),
        timestep_fraction=0.9,
        actor=DiffusionActorConfig(
            lora_rank=32,
            lora_alpha=64,
            target_modules=_ATTENTION,
            loss=DenoisingPolicyConfig(
                clip_ratio=1e-4, kl_loss_coef=0.01, kl_loss_type="flow_grpo"
            ),
            micro_batch_size=9,
            ema_decay=_EMA_DECAY,
        ),
    )


def flux_1_dev_pickscore() -> DiffusionConfig:
    """FLUX.1 dev on PickScore, adapters, on 8 GPUs. Planned only; no GPU has run it.

    Hyperparameters: Flow-GRPO's config/grpo.py, `pickscore_flux`, for 32 GPUs; adapters: its scripts/train_flux.py.
    """
    return _pickscore(
        "FLUX.1-dev",
        num_gpus=8,
        prompts=48,
        rollout=DiffusionRolloutConfig(
            n=24,
            num_inference_steps=6,
            guidance_scale=3.5,
            noise_level=0.9,
            max_sequence_length=128,
            max_num_images=24,
            eval_num_inference_steps=28,
        ),
        timestep_fraction=0.85,
        actor=DiffusionActorConfig(
            lora_rank=64,
            lora_alpha=128,
            target_modules=(
                *_ATTENTION,
                "ff.net.0.proj",
                "ff.net.2",
                "ff_context.net.0.proj",
                "ff_context.net.2",
            ),
            loss=DenoisingPolicyConfig(clip_ratio=1e-4),
            micro_batch_size=3,
            ema_decay=_EMA_DECAY,
        ),
    )


def qwen_image_pickscore() -> DiffusionConfig:
    """Qwen-Image on PickScore, adapters, on 32 GPUs. Planned only; no GPU has run it.

    Hyperparameters: Flow-GRPO's config/grpo.py, `pickscore_qwenimage`, for 32 GPUs, with noise in two steps; adapters:
    verl's examples/flowgrpo_trainer/run_flowgrpo.sh.
    """
    return _pickscore(
        "Qwen-Image",
        num_gpus=32,
        prompts=32,
        rollout=DiffusionRolloutConfig(
            n=16,
            num_inference_steps=10,
            guidance_scale=4.0,
            noise_level=1.2,
            window_size=2,
            window_range=(0, 5),
            max_sequence_length=256,
            max_num_images=16,
            eval_num_inference_steps=50,
        ),
        actor=DiffusionActorConfig(
            lora_rank=64,
            lora_alpha=128,
            target_modules=(
                *_ATTENTION,
                "img_mlp.net.0.proj",
                "img_mlp.net.2",
                "txt_mlp.net.0.proj",
                "txt_mlp.net.2",
            ),
            loss=DenoisingPolicyConfig(clip_ratio=1e-4),
            micro_batch_size=4,
        ),
    )


PUBLISHED: Mapping[str, Callable[[], DiffusionConfig]] = {
    recipe.__name__: recipe
    for recipe in (sd3_5_medium_pickscore, flux_1_dev_pickscore, qwen_image_pickscore)
}
"""All recipes of this file, by name."""


def _pickscore(
    model: str,
    *,
    num_gpus: int,
    prompts: int,
    rollout: DiffusionRolloutConfig,
    actor: DiffusionActorConfig,
    timestep_fraction: float = 1.0,
) -> DiffusionConfig:
    """Return settings for a cluster whose GPUs have a rank of FSDP2 and an engine each, by turns; 512 x 512 pixels."""
    shared: dict[str, Any] = {
        "size": (512, 512),
        "dtype": "bfloat16",
        "num_processes": num_gpus,
        "colocated": True,
        "eval_n": 1,
    }
    return DiffusionConfig(
        model=model,
        runtime="ray",
        controllers=max(1, num_gpus // 8),
        data=DiffusionDataConfig(
            train_files=("data/pickscore/train.txt",),
            val_files=("data/pickscore/test.txt",),
            train_batch_size=prompts,
        ),
        reward=RewardConfig(kind="pick_score", path="PickScore_v1"),
        rollout=replace(rollout, **shared),
        algorithm=DiffusionAlgorithmConfig(
            filter_groups=False, timestep_fraction=timestep_fraction
        ),
        actor=replace(
            actor,
            dtype="bfloat16",
            num_updates=2,
            optim=DiffusionOptimConfig(lr=3e-4, weight_decay=1e-4),
            enable_gradient_checkpointing=True,
        ),
        trainer=DiffusionTrainerConfig(
            num_processes=num_gpus, total_training_steps=2000, save_freq=60, test_freq=60
        ),
    )
