"""The rewards that a config names."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.reward_config import RewardConfig
from gcore_rollout import ColourReward, JPEGCompressibility, evaluate_images, load_function
from gcore_runs.errors import UserError

if TYPE_CHECKING:
    from gcore_rollout import Engine


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """What scores images."""

    trained: Callable[..., Any]
    """What is trained on."""
    held_out: Callable[..., Any] | None
    """A reward that is not."""
    is_judged: bool = False
    """Whether engines of a judge score, which note their own work."""


def build_rewards(config: DiffusionConfig, *, judge: "Engine | None") -> Rewards:
    """The rewards of a run.

    Args:
        config: the run's.
        judge: the engine of its judge, if it has one.

    Raises:
        UserError: no such reward, or one that lacks a setting.
        RewardError: a file that does not import; local weights that are none.
    """
    kind, gradient = config.reward.kind or "digit", reward_gradient(config)
    build = partial(build_reward, config=config.reward, device=config.device)
    return Rewards(
        trained=_score_of(gradient) if gradient else build(kind, setting="reward.kind", judge=judge),
        held_out=build(config.reward.held_out, setting="reward.held_out") if config.reward.held_out else None,
        is_judged=kind == "judge",
    )


def reward_gradient(config: DiffusionConfig) -> Callable[..., Any] | None:
    """The differentiable reward, of latents and prompts, where the algorithm goes through it.

    Raises:
        RewardError: a file that does not import.
    """
    kind = config.reward.kind
    if config.algorithm.name != "reward_gradient" or ":" not in kind or kind.startswith(("http://", "https://")):
        return None
    return load_function(kind, setting="reward.kind")


def build_reward(
    kind: str, config: RewardConfig, *, device: str, setting: str, judge: "Engine | None" = None
) -> Callable[..., Any]:
    """A reward by its name.

    Args:
        kind: see `RewardConfig.kind`.
        config: its settings.
        device: of what it loads here.
        setting: where the name is from, for errors.
        judge: the engine of a judge.

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
            from gcore_rollout import CLIPReward

            return CLIPReward(local_path(config, kind), device=device, scale=1.0 if kind == "clip" else None)
        case "aesthetic":
            from gcore_rollout import AestheticReward

            if not config.head:
                raise UserError("reward.head is not set: aesthetic needs a safetensors file of its head")
            return AestheticReward(local_path(config, kind), config.head, device=device)
        case "image_reward":
            from gcore_rollout import ImageRewardScore

            if not config.head:
                raise UserError("reward.head is not set: image_reward needs ImageReward.pt")
            return ImageRewardScore(config.head, local_path(config, kind), device=device)
        case "judge":
            from gcore_diffusion.judge import judge_reward

            assert judge is not None
            return judge_reward(local_path(config, kind), config.judge, judge)
        case _ if kind.startswith(("http://", "https://")):
            from gcore_rollout import HTTPImageReward

            return HTTPImageReward(kind)
        case _ if ":" in kind:
            return load_function(kind, setting=setting)
        case _:
            raise UserError(
                f"{setting} is {kind!r}: jpeg_compressibility, jpeg_incompressibility, clip, pick_score, aesthetic, "
                "image_reward, judge, digit, colour, a URL or PATH.py:function is needed"
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


def local_path(config: RewardConfig, kind: str) -> Path:
    """The folder that a kind of reward loads.

    Raises:
        UserError: none is set.
    """
    if not config.path:
        needs = {"image_reward": "its tokenizer", "judge": "a vision-language model"}.get(kind, "a CLIP model")
        raise UserError(f"reward.path is not set: {kind} needs a local folder of {needs}")
    return Path(config.path)


def _score_of(gradient: Callable[..., Any]) -> Callable[..., Any]:
    """The differentiable reward on finished images, for what is shown."""
    import torch

    def score(pixels: Any, prompts: Any, rows: Any) -> Any:
        del rows
        latents = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.no_grad():
            return gradient(latents, prompts).double().numpy()

    return score
