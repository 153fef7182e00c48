"""Settings of rewards and environments, and what they name: registered rewards, URLs and ``PATH.py:function``."""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gcore_rollout.errors import RewardConfigError, RewardError, require
from gcore_rollout.images.reward import FrameReward, ImageRewardFunction, make_jpeg_reward
from gcore_rollout.rewards.batch import BatchReward
from gcore_rollout.rewards.kinds.composite import CompositeReward, reward_terms
from gcore_rollout.rewards.kinds.graders import (
    MultipleChoiceReward,
    make_aime_reward,
    make_gsm8k_reward,
)
from gcore_rollout.rewards.kinds.verifiers import CodeReward, MathVerifyReward, ReasoningGymReward
from gcore_rollout.rewards.process import ProcessLimits, ProcessReward
from gcore_rollout.rewards.reward import RewardFunction, name_of
from gcore_rollout.rewards.runner import is_async
from gcore_rollout.sandbox.sandbox import Sandbox

KindT = TypeVar("KindT")


@dataclass(frozen=True, kw_only=True)
class ImageRewardSettings:
    """Settings of image rewards, of which each kind uses those that it needs.

    Example:
        >>> settings = ImageRewardSettings(jpeg_size=64)
        >>> reward = build_image_reward("jpeg_compressibility", settings, setting="reward.kind")
        >>> images = np.zeros((2, 128, 128, 3), np.uint8)
        >>> reward(images, ["a", "b"], [{}, {}]).shape
        (2,)
    """

    path: str = ""
    """Hugging Face folder."""
    head: str = ""
    """File of weights."""
    jpeg_size: int = 0
    """Pixels that a side is resized to before compression; 0: as it is."""
    text_key: str = ""
    """Column of the text that an image is to show; empty: it is in double quotes in the prompt."""
    thresholds: tuple[float, float] = (0.3, 0.9)
    """Confidence of detected objects, and of those that are to be counted."""
    num_frames: int = 8
    """Frames of a video over which the mean is taken; see `FrameReward`."""
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class ImageRewardKind:
    """A kind of image reward, and the settings that it needs.

    Example:
        >>> def make(settings):
        ...     return lambda images, prompts, rows: images.mean((1, 2, 3)) / 255
        >>> kind = ImageRewardKind(make=make)  # register_image_reward("brightness", kind) lets settings name it
        >>> reward = kind.make(ImageRewardSettings())
        >>> reward(np.full((1, 8, 8, 3), 51, np.uint8), ["a dusk"], [{}])
        array([0.2])
        >>> image_reward_kind("pick_score").path
        'a CLIP model'
    """

    make: Callable[[ImageRewardSettings], ImageRewardFunction]
    path: str = ""
    """The content of the folder at ``path``, for errors; empty: none is needed."""
    head: str = ""
    """The content of the file at ``head``, for errors; empty: none is needed."""
    is_model: bool = False
    """Whether it computes on a device."""


def _make_image_reward(name: str, settings: ImageRewardSettings) -> ImageRewardFunction:
    if name == "jpeg_compressibility":
        return make_jpeg_reward(sign=-1, size=settings.jpeg_size)
    if name == "jpeg_incompressibility":
        return make_jpeg_reward(sign=1, size=settings.jpeg_size)
    from gcore_rollout.images import geneval, models, text

    match name:
        case "clip":
            return models.make_clip_reward(settings.path, device=settings.device)
        case "pick_score":
            return models.make_clip_reward(settings.path, device=settings.device, scale=None)
        case "hps":
            return models.make_clip_reward(
                settings.path, weights=settings.head, device=settings.device
            )
        case "ocr":
            return text.OCRReward(settings.path, text_key=settings.text_key, device=settings.device)
        case "geneval":
            return geneval.GenEvalReward(
                settings.path,
                clip=settings.head,
                thresholds=settings.thresholds,
                device=settings.device,
            )
        case "aesthetic":
            return models.make_aesthetic_reward(
                settings.path, settings.head, device=settings.device
            )
        case _:
            return models.make_blip_reward(settings.head, settings.path, device=settings.device)


def _math_verify(answer_key: str = "answer") -> RewardFunction:
    make = partial(MathVerifyReward, answer_key=answer_key)
    return ProcessReward(make, limit_score=0.0, preload=("math_verify",))


def _code(tests_key: str = "tests", partial: bool = False) -> RewardFunction:
    return CodeReward(Sandbox(), tests_key=tests_key, partial=partial)


_REWARDS: dict[str, Callable[..., RewardFunction]] = {
    "math-verify": _math_verify,
    "gsm8k": make_gsm8k_reward,
    "aime": make_aime_reward,
    "multiple-choice": MultipleChoiceReward,
    "code": _code,
}
_IMAGE_REWARDS = {
    name: ImageRewardKind(
        make=partial(_make_image_reward, name), path=path, head=head, is_model=bool(path)
    )
    for name, path, head in (
        ("jpeg_compressibility", "", ""),
        ("jpeg_incompressibility", "", ""),
        ("clip", "a CLIP model", ""),
        ("pick_score", "a CLIP model", ""),
        ("hps", "a CLIP model of ViT-H/14", "HPS_v2.1_compressed.pt or HPS_v2_compressed.pt"),
        ("aesthetic", "a CLIP model", "a safetensors file of its head"),
        ("ocr", "a model that reads text in images", ""),
        ("geneval", "an object detector", ""),
        ("image_reward", "its tokenizer", "ImageReward.pt"),
    )
}


def register_reward(name: str, make: Callable[[], RewardFunction]) -> None:
    """Add a reward, for settings to name; `ValueError` if the name is taken."""
    _register(_REWARDS, name, make)


def register_image_reward(name: str, kind: ImageRewardKind) -> None:
    """Add a kind of image reward, for settings to name; `ValueError` if the name is taken."""
    _register(_IMAGE_REWARDS, name, kind)


def _register(kinds: dict[str, KindT], name: str, kind: KindT) -> None:
    if name in kinds:
        raise ValueError(
            f"name is {name!r}; expected one that is not registered yet: {', '.join(kinds)} are"
        )
    kinds[name] = kind


def image_reward_kind(name: str) -> ImageRewardKind | None:
    """Return the registered kind of image reward; None: there is none of this name."""
    return _IMAGE_REWARDS.get(name)


def reward_names() -> list[str]:
    """Return the names of the registered rewards."""
    return list(_REWARDS)


def build_reward(
    spec: str,
    *,
    prompt_key: str = "prompt",
    kwargs: Mapping[str, Any] | None = None,
    process_limits: ProcessLimits | None = None,
) -> RewardFunction:
    """Make the registered reward of this name, import the function that ``PATH.py:function`` names, or add several.

    ``0.5 * PATH.py:format + PATH.py:correct`` is a `CompositeReward`, whose parts have the names of the functions.

    Args:
        prompt_key: the column of the prompt; see `load_reward`.
        kwargs: arguments of the reward by name; of several, each gets those that it has a parameter for.
        process_limits: run functions in a process of their own, with these limits; see `ProcessReward`.

    Raises:
        RewardError: there is no such function, it cannot be called, one of ``kwargs`` is no parameter of any, or with
            ``process_limits`` it is async.
    """
    terms = {spec: 1.0}
    if spec not in _REWARDS and (" + " in spec or " * " in spec):
        terms = reward_terms(spec, setting="reward")
    kwargs = kwargs or {}
    unused = dict(kwargs)
    rewards: dict[str, RewardFunction] = {}
    for term in terms:
        function = _REWARDS.get(term) or load_function(term, setting="reward")
        arguments: dict[str, Any] = {}
        for name, value in kwargs.items():
            if _takes_setting(function, name):
                arguments[name] = value
                unused.pop(name, None)
        if term in _REWARDS:
            rewards[term] = function(**arguments)
            continue
        reward = _with_arguments(function, prompt_key=prompt_key, kwargs=arguments)
        if process_limits is not None:
            reward = _run_in_process(reward, term, prompt_key, arguments, process_limits)
        rewards[term] = reward
    for name, value in unused.items():
        raise RewardConfigError(
            f"reward_kwargs.{name} is {value!r}; expected the name of a parameter of {spec}"
        )
    if terms == {spec: 1.0}:
        return rewards[spec]
    names = [term.rpartition(":")[2] for term in terms]
    if len(set(names)) < len(names):
        names = list(terms)
    weights = dict(zip(names, terms.values(), strict=True))
    return CompositeReward(dict(zip(names, rewards.values(), strict=True)), weights=weights)


def _run_in_process(
    reward: RewardFunction,
    spec: str,
    prompt_key: str,
    kwargs: Mapping[str, Any],
    limits: ProcessLimits,
) -> RewardFunction:
    """Return the reward that ``spec`` names with its function in a process of its own."""
    function = _remove_batching(reward)
    if is_async(function):
        expected = f"False with reward {spec!r}, which is async"
        raise RewardConfigError(f"reward_calls.in_process is True; expected {expected}")
    in_process = ProcessReward(
        partial(_load_unbatched, spec, prompt_key, kwargs), reward=function, limits=limits
    )
    if function is reward:
        return in_process
    return BatchReward(in_process)


def _load_unbatched(spec: str, prompt_key: str, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    return _remove_batching(load_reward(spec, prompt_key=prompt_key, kwargs=kwargs))


def _remove_batching(reward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a reward as its calls have it: one that takes lists without the `BatchReward` that collects them."""
    if isinstance(reward, BatchReward):
        return reward.function
    return reward


def _takes_setting(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function has a parameter of this name that is not one of each call."""
    from gcore_rollout.rewards.signatures import CALL_PARAMETERS

    if name in CALL_PARAMETERS:
        return False
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def build_task_reward(task: str, *, answer_after: str = "") -> RewardFunction:
    """Make the `ReasoningGymReward` of a task, in a process of its own if the task's verifier computes.

    A response that keeps it busy for longer than `ProcessLimits.call_s` scores 0.
    """
    make = partial(ReasoningGymReward, answer_after=answer_after, names_task=task == "composite")
    reward = make()
    if not reward.computes(task):
        return reward
    return ProcessReward(make, limit_score=0.0, preload=("reasoning_gym",))


def build_image_reward(
    name: str, settings: ImageRewardSettings, *, setting: str, group: str = ""
) -> ImageRewardFunction:
    """Make the image reward of a registered kind, at an http(s) URL, or by ``PATH.py:function``.

    The first two score videos by their frames; a function gets them whole. ``setting`` is the name of the setting that
    names it, such as ``reward.kind``, for errors, and ``group`` that of the section with its path and head; empty: the
    same. `RewardConfigError` if there is no such reward, or it lacks a setting; `RewardError` if the user's file does
    not import.
    """
    kind = _IMAGE_REWARDS.get(name)
    if kind is not None:
        group = group or setting.rpartition(".")[0]
        if kind.head and not settings.head:
            raise RewardConfigError(f"{group}.head is not set; expected {kind.head} for {name}")
        if kind.path and not settings.path:
            raise RewardConfigError(
                f"{group}.path is not set; expected a local folder of {kind.path} for {name}"
            )
        return FrameReward(
            kind.make(settings), num_frames=settings.num_frames, one_at_a_time=kind.is_model
        )
    if name.startswith(("http://", "https://")):
        from gcore_rollout.rewards.kinds.http import HTTPImageReward

        return FrameReward(HTTPImageReward(name), num_frames=settings.num_frames)
    if ":" in name:
        return load_function(name, setting=setting)
    raise RewardConfigError(
        f"{setting} is {name!r}; expected {', '.join(_IMAGE_REWARDS)}, a URL or PATH.py:function"
    )


def load_reward(
    spec: str, *, prompt_key: str = "prompt", kwargs: Mapping[str, Any] | None = None
) -> RewardFunction:
    """Import the reward that ``PATH.py:function`` names; see `load_function`.

    Its parameters are those of a `RewardFunction`, of verl or of TRL, or lists; see `with_known_parameters`.
    ``prompt_key`` is the column of a row that has the prompt, and ``kwargs`` are further arguments by name.
    """
    return _with_arguments(
        load_function(spec, setting="reward"), prompt_key=prompt_key, kwargs=kwargs or {}
    )


def _with_arguments(
    function: Callable[..., Any], *, prompt_key: str, kwargs: Mapping[str, Any]
) -> RewardFunction:
    if kwargs:
        name = name_of(function)
        function = partial(function, **kwargs)
        function.__name__ = name  # pyright: ignore[reportAttributeAccessIssue]
    code = getattr(function, "__code__", None)
    if code is not None and code.co_varnames[: code.co_argcount] == ("prompt", "completion", "row"):
        return function
    from gcore_rollout.rewards.signatures import with_known_parameters

    return with_known_parameters(function, setting="reward", prompt_key=prompt_key)


def load_function(spec: str, *, setting: str) -> Callable[..., Any]:
    """Import the function that ``PATH.py:function`` names; ``setting`` is the name of the setting, for errors.

    A `RewardError` if the form is wrong, the file is missing or does not import, or it has no such function.
    """
    file, _, name = spec.rpartition(":")
    is_function = file.endswith(".py") and name.isidentifier()
    require(setting, spec, is_function, "PATH.py:function", RewardError)
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
        raise RewardError(
            f"{setting} file {path} does not import: {type(error).__name__}: {error}"
        ) from error
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        public = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise RewardError(
            f"{setting} is {spec!r}: {path} has no function {name!r}, it has {public}"
        )
    return function
