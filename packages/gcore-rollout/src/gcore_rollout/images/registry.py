"""The registry of image rewards that settings name, besides URLs and ``PATH.py:function``."""

from collections.abc import Callable
from dataclasses import dataclass

from gcore_rollout.errors import RewardConfigError
from gcore_rollout.images.reward import ImageRewardFunction
from gcore_rollout.python_file import load_function


@dataclass(frozen=True, kw_only=True)
class ImageRewardSettings:
    """Settings of image rewards, of which each kind uses those that it needs."""

    path: str = ""
    """Hugging Face folder."""
    head: str = ""
    """File of weights."""
    jpeg_size: int = 0
    """Pixels that a side is resized to before compression; 0: as it is."""
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class ImageRewardKind:
    """A kind of image reward, and the settings that it needs."""

    make: Callable[[ImageRewardSettings], ImageRewardFunction]
    path: str = ""
    """The content of the folder at ``path``, for errors; empty: none is needed."""
    head: str = ""
    """The content of the file at ``head``, for errors; empty: none is needed."""


def _jpeg(sign: int) -> Callable[[ImageRewardSettings], ImageRewardFunction]:
    def make(settings: ImageRewardSettings) -> ImageRewardFunction:
        from gcore_rollout.images.jpeg import JPEGCompressibility

        return JPEGCompressibility(sign=sign, size=settings.jpeg_size)

    return make


def _clip(scale: float | None) -> Callable[[ImageRewardSettings], ImageRewardFunction]:
    def make(settings: ImageRewardSettings) -> ImageRewardFunction:
        from gcore_rollout.images.clip import CLIPReward

        return CLIPReward(settings.path, device=settings.device, scale=scale)

    return make


def _aesthetic(settings: ImageRewardSettings) -> ImageRewardFunction:
    from gcore_rollout.images.clip import AestheticReward

    return AestheticReward(settings.path, settings.head, device=settings.device)


def _image_reward(settings: ImageRewardSettings) -> ImageRewardFunction:
    from gcore_rollout.images.blip import ImageRewardScore

    return ImageRewardScore(settings.head, settings.path, device=settings.device)


_KINDS = {
    "jpeg_compressibility": ImageRewardKind(make=_jpeg(-1)),
    "jpeg_incompressibility": ImageRewardKind(make=_jpeg(1)),
    "clip": ImageRewardKind(make=_clip(1.0), path="a CLIP model"),
    "pick_score": ImageRewardKind(make=_clip(None), path="a CLIP model"),
    "aesthetic": ImageRewardKind(make=_aesthetic, path="a CLIP model", head="a safetensors file of its head"),
    "image_reward": ImageRewardKind(make=_image_reward, path="its tokenizer", head="ImageReward.pt"),
}


def register_image_reward(name: str, kind: ImageRewardKind) -> None:
    """Add a kind of image reward, for settings to name.

    Raises:
        ValueError: the name is taken.
    """
    if name in _KINDS:
        raise ValueError(f"name is {name!r}; expected one that is not registered yet: {', '.join(_KINDS)} are")
    _KINDS[name] = kind


def build_image_reward(name: str, settings: ImageRewardSettings, *, setting: str) -> ImageRewardFunction:
    """Make the image reward that a setting names.

    Args:
        name: of a registered kind, an http(s) URL, or ``PATH.py:function``.
        settings: of rewards.
        setting: the name of the setting, such as ``reward.kind``, for errors.

    Raises:
        RewardConfigError: there is no such reward, or it lacks a setting.
        RewardError: the user's file does not import.
    """
    if kind := _KINDS.get(name):
        group = setting.rpartition(".")[0]
        if kind.head and not settings.head:
            raise RewardConfigError(f"{group}.head is not set; expected {kind.head} for {name}")
        if kind.path and not settings.path:
            raise RewardConfigError(f"{group}.path is not set; expected a local folder of {kind.path} for {name}")
        return kind.make(settings)
    if name.startswith(("http://", "https://")):
        from gcore_rollout.images.http import HTTPImageReward

        return HTTPImageReward(name)
    if ":" in name:
        return load_function(name, setting=setting)
    raise RewardConfigError(f"{setting} is {name!r}; expected {', '.join(_KINDS)}, a URL or PATH.py:function")
