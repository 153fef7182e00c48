"""The rewards that a config names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gcore_diffusion.config import RewardConfig
from gcore_rollout.image_rewards import ColourReward, JPEGCompressibility, evaluate_images
from gcore_rollout.rewards import load_function
from gcore_runs.errors import UserError


def build_reward(kind: str, config: RewardConfig, *, device: str, setting: str) -> Callable[..., Any]:
    """A reward by its name.

    Raises:
        UserError: no such reward, or one that lacks a setting.
        RewardError: a file that does not import; local weights that are none.
    """
    match kind:
        case "jpeg_compressibility" | "jpeg_incompressibility":
            return JPEGCompressibility(sign=-1 if kind == "jpeg_compressibility" else 1, size=config.jpeg_size)
        case "digit":
            from gcore_diffusion.demo.digits import DigitReward

            return DigitReward()
        case "colour":
            from gcore_diffusion.demo.digits import COLOURS

            return ColourReward(COLOURS)
        case "clip" | "pick_score":
            from gcore_rollout.image_rewards.clip import CLIPReward

            return CLIPReward(_path(config, kind), device=device, scale=1.0 if kind == "clip" else None)
        case "aesthetic":
            from gcore_rollout.image_rewards.clip import AestheticReward

            if not config.head:
                raise UserError("reward.head is not set: aesthetic needs a safetensors file of its head")
            return AestheticReward(_path(config, kind), config.head, device=device)
        case _ if kind.startswith(("http://", "https://")):
            from gcore_rollout.image_rewards.http import HTTPImageReward

            return HTTPImageReward(kind)
        case _ if ":" in kind:
            return load_function(kind, setting=setting)
        case _:
            raise UserError(
                f"{setting} is {kind!r}: jpeg_compressibility, jpeg_incompressibility, clip, pick_score, aesthetic, "
                "digit, colour, a URL or PATH.py:function is needed"
            )


async def try_reward(reward: Callable[..., Any], prompt: Any, *, height: int, width: int) -> None:
    """Score a grey image of the run's size, so that a broken reward is found before anything is trained.

    Raises:
        RewardError: it does not score it.
    """
    if check := getattr(reward, "check", None):
        check(height, width)
    images = np.full((2, height, width, 3), 128, np.uint8)
    await evaluate_images(reward, images, [prompt.text] * 2, [prompt.row] * 2)


def _path(config: RewardConfig, kind: str) -> Path:
    if not config.path:
        raise UserError(f"reward.path is not set: {kind} needs a local folder of a CLIP model")
    return Path(config.path)
