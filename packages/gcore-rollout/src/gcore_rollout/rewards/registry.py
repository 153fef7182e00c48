"""The rewards that settings name: registered kinds, URLs and ``PATH.py:function``; and the settings of the kinds."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from gcore_rollout.errors import RewardConfigError, RewardError
from gcore_rollout.rewards.reward import RewardFunction

if TYPE_CHECKING:
    from gcore_rollout.images.reward import ImageRewardFunction

KindT = TypeVar("KindT")

Reduce = Literal["mean", "median", "majority"]
"""How several verdicts become one. The majority is the most frequent score, and the lowest of those on a tie."""


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """Settings of the questions to a generative reward model and of the reading of its verdicts; a base of settings."""

    template: str = ""
    """File with the question, with fields in braces; empty: how good it is, from 0 to 10."""
    n: int = 1
    """Verdicts on each question."""
    reduce: Reduce = "mean"
    """How several verdicts become one score."""
    temperature: float = 1.0
    """Temperature of its sampling; 0: greedy."""
    max_response_length: int = 512
    """Longest verdict in tokens."""
    pattern: str = ""
    """Regular expression whose first group is the score; its last match in a verdict counts. Empty: "Score: 7"."""
    low: float = 0.0
    """The score that is scaled to 0."""
    high: float = 10.0
    """The score that is scaled to 1."""

    def check(self) -> None:
        """Check the settings.

        Raises:
            RewardConfigError: a setting is out of its range.
        """
        for name, least in (("n", 1), ("max_response_length", 1), ("temperature", 0)):
            if not getattr(self, name) >= least:
                raise RewardConfigError(f"{name} is {getattr(self, name)}; expected at least {least}")
        if self.low == self.high:
            raise RewardConfigError(f"low and high are both {self.low}; expected two scores")

    def question(self, *, setting: str) -> str:
        """Read the file of the question; empty: there is none. ``setting`` is its name, for errors.

        Raises:
            RewardConfigError: the file cannot be read.
        """
        try:
            return Path(self.template).read_text("utf-8") if self.template else ""
        except (OSError, UnicodeDecodeError) as error:
            raise RewardConfigError(f"{setting} is {self.template!r}: {error}") from None


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

    make: Callable[[ImageRewardSettings], "ImageRewardFunction"]
    path: str = ""
    """The content of the folder at ``path``, for errors; empty: none is needed."""
    head: str = ""
    """The content of the file at ``head``, for errors; empty: none is needed."""


def _math_verify() -> RewardFunction:
    from gcore_rollout.rewards.kinds.verifiers import MathVerifyReward

    return MathVerifyReward()


def _code() -> RewardFunction:
    from gcore_rollout.rewards.kinds.verifiers import CodeReward
    from gcore_rollout.sandbox.sandbox import Sandbox

    return CodeReward(Sandbox())


def _jpeg(settings: ImageRewardSettings, *, sign: int) -> "ImageRewardFunction":
    from gcore_rollout.images.reward import JPEGCompressibility

    return JPEGCompressibility(sign=sign, size=settings.jpeg_size)


def _clip(settings: ImageRewardSettings, *, scale: float | None) -> "ImageRewardFunction":
    from gcore_rollout.images.models import CLIPReward

    return CLIPReward(settings.path, device=settings.device, scale=scale)


def _aesthetic(settings: ImageRewardSettings) -> "ImageRewardFunction":
    from gcore_rollout.images.models import AestheticReward

    return AestheticReward(settings.path, settings.head, device=settings.device)


def _image_reward(settings: ImageRewardSettings) -> "ImageRewardFunction":
    from gcore_rollout.images.models import ImageRewardScore

    return ImageRewardScore(settings.head, settings.path, device=settings.device)


_REWARDS: dict[str, Callable[[], RewardFunction]] = {"math-verify": _math_verify, "code": _code}
_IMAGE_REWARDS = {
    "jpeg_compressibility": ImageRewardKind(make=partial(_jpeg, sign=-1)),
    "jpeg_incompressibility": ImageRewardKind(make=partial(_jpeg, sign=1)),
    "clip": ImageRewardKind(make=partial(_clip, scale=1.0), path="a CLIP model"),
    "pick_score": ImageRewardKind(make=partial(_clip, scale=None), path="a CLIP model"),
    "aesthetic": ImageRewardKind(make=_aesthetic, path="a CLIP model", head="a safetensors file of its head"),
    "image_reward": ImageRewardKind(make=_image_reward, path="its tokenizer", head="ImageReward.pt"),
}


def register_reward(name: str, make: Callable[[], RewardFunction]) -> None:
    """Add a reward, for settings to name.

    Raises:
        ValueError: the name is taken.
    """
    _register(_REWARDS, name, make)


def register_image_reward(name: str, kind: ImageRewardKind) -> None:
    """Add a kind of image reward, for settings to name.

    Raises:
        ValueError: the name is taken.
    """
    _register(_IMAGE_REWARDS, name, kind)


def _register(kinds: dict[str, KindT], name: str, kind: KindT) -> None:
    if name in kinds:
        raise ValueError(f"name is {name!r}; expected one that is not registered yet: {', '.join(kinds)} are")
    kinds[name] = kind


def reward_names() -> list[str]:
    """Return the names of the registered rewards."""
    return list(_REWARDS)


def build_reward(spec: str) -> RewardFunction:
    """Make the registered reward of this name, or import the function that ``PATH.py:function`` names.

    Raises:
        RewardError: it does not load.
    """
    return _REWARDS[spec]() if spec in _REWARDS else load_reward(spec)


def build_image_reward(name: str, settings: ImageRewardSettings, *, setting: str) -> "ImageRewardFunction":
    """Make the image reward that a setting names.

    Args:
        name: of a registered kind, an http(s) URL, or ``PATH.py:function``.
        settings: of rewards.
        setting: the name of the setting, such as ``reward.kind``, for errors.

    Raises:
        RewardConfigError: there is no such reward, or it lacks a setting.
        RewardError: the user's file does not import.
    """
    if kind := _IMAGE_REWARDS.get(name):
        group = setting.rpartition(".")[0]
        if kind.head and not settings.head:
            raise RewardConfigError(f"{group}.head is not set; expected {kind.head} for {name}")
        if kind.path and not settings.path:
            raise RewardConfigError(f"{group}.path is not set; expected a local folder of {kind.path} for {name}")
        return kind.make(settings)
    if name.startswith(("http://", "https://")):
        from gcore_rollout.rewards.kinds.http import HTTPImageReward

        return HTTPImageReward(name)
    if ":" in name:
        return load_function(name, setting=setting)
    raise RewardConfigError(f"{setting} is {name!r}; expected {', '.join(_IMAGE_REWARDS)}, a URL or PATH.py:function")


def load_reward(spec: str) -> RewardFunction:
    """Import the reward that ``PATH.py:function`` names; see `load_function`."""
    return load_function(spec, setting="reward")


def load_function(spec: str, *, setting: str) -> Callable[..., Any]:
    """Import the function that ``PATH.py:function`` names.

    Args:
        spec: path and name.
        setting: the name of the setting, for errors.

    Raises:
        RewardError: the form is wrong, the file is missing or does not import, or it has no such function.
    """
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise RewardError(f"{setting} is {spec!r}; expected PATH.py:function")
    path = Path(file)
    if not path.is_file():
        raise RewardError(f"{setting} is {spec!r}: no such file {path}")
    module_name = f"gcore_user_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    # Dataclasses and pickling look their module up by name.
    sys.modules[module_name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise RewardError(f"{setting} file {path} does not import: {type(error).__name__}: {error}") from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        public = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise RewardError(f"{setting} is {spec!r}: {path} has no function {name!r}, it has {public}")
    return function
