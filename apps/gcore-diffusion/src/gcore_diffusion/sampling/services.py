"""Engines of images and of a judge, and the rewards that a config names."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_agents import MessageError, render_chat
from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.reward_config import DEMO_REWARDS
from gcore_rollout import (
    PRELOAD_DIFFUSERS,
    DiffusersEngine,
    Engine,
    EngineModelError,
    FrameReward,
    ImageCompositeReward,
    ImageJudgeReward,
    ImageRewardKind,
    ImageRewardSettings,
    VisionProcessor,
    build_image_reward,
    engine_factory,
    load_function,
    make_colour_reward,
    register_image_reward,
)
from gcore_runs import UserError, build_tokenizer, check_model, keep_free_memory
from gcore_runs.engines import Instrumentation, device_options


def sampler_factory(config: DiffusionConfig, *, model: Path) -> Callable[[], DiffusersEngine]:
    """Return what makes an engine of images, in this process or, pickled, in another."""
    rollout = config.rollout
    return partial(
        _start_sampler,
        model.absolute(),
        device=config.engine_device,
        dtype=rollout.dtype,
        max_num_images=rollout.max_num_images,
        options=rollout.pipeline_options,
        size=rollout.image_size,
        component=config.actor.component,
        compiles=rollout.compile,
        offload_text_encoders=rollout.offload_text_encoders and config.engine_device != "cpu",
    )


def _start_sampler(model: Path, **options: Any) -> DiffusersEngine:
    if options["device"] == "cpu":
        keep_free_memory()
    return DiffusersEngine.from_pretrained(model, **options)


def judge_factory(config: DiffusionConfig) -> Callable[[], Engine]:
    """Return what makes an engine of the judge, in this process or, pickled, in another; raises as `judge_model`."""
    import torch

    judge = config.reward.judge
    path, tokenizer = judge_model(config)
    return engine_factory(
        judge.engine,
        path,
        device=config.engine_device,
        dtype=getattr(torch, judge.dtype),
        max_num_seqs=judge.max_num_seqs,
        eos_token_ids=[tokenizer.eos_token_id],
        own_options=device_options(judge, config),
        engine_options=judge.engine_options,
    )


def judge_model(config: DiffusionConfig) -> tuple[Path, Any]:
    """Return the folder of the judge's model, and its tokenizer; `UserError` if it cannot be asked about images."""
    path = Path(config.reward.judge_path).absolute()
    check_model(path, setting="reward.path", may_be_quantized=True)
    tokenizer = build_tokenizer(path)
    if tokenizer.chat_template is None:
        raise UserError(
            f"reward.path is {str(path)!r}: its tokenizer has no chat template, which places the image"
        )
    return path, tokenizer


async def start_engines(
    config: DiffusionConfig,
    model: Path,
    instrumentation: Instrumentation,
    to_close: AsyncExitStack,
) -> tuple[Engine[Any, Any], Engine[Any, Any] | None]:
    """Start the engine of the pipeline in a folder, and a judge's if the run has one, which ``to_close`` then closes.

    Each is in this process, or several in their own.
    """
    judge = config.reward.judge
    num_threads = max(1, config.threads // config.sizes.num_engine_places)
    policy: Engine[Any, Any] = await instrumentation.start(
        sampler_factory(config, model=model),
        config.rollout.num_processes,
        num_threads=num_threads,
        preload=PRELOAD_DIFFUSERS,
        num_lent=config.sizes.num_lent,
    )
    to_close.push_async_callback(policy.close)
    if not config.reward.is_judged:
        return policy, None
    judges: Engine[Any, Any] = await replace(instrumentation, role="judge").start(
        judge_factory(config),
        judge.num_processes,
        num_threads=num_threads,
        preload=judge.kind.preload,
    )
    to_close.push_async_callback(judges.close)
    return policy, judges


@dataclass(frozen=True, kw_only=True)
class ImageRewards:
    """Scores images."""

    trained: Callable[..., Any]
    """The reward that is trained on."""
    held_out: Callable[..., Any] | None
    """A reward that is only measured."""

    @property
    def need_images(self) -> bool:
        """True unless all of them score latents."""
        rewards = filter(None, (self.trained, self.held_out))
        return not all(map(takes_latents, rewards))


def takes_latents(reward: Callable[..., Any]) -> bool:
    """Return whether a reward scores latents, by the name of its first parameter, in place of images."""
    return next(iter(signature(reward).parameters), "") == "latents"


def build_rewards(config: DiffusionConfig, *, judge: Engine | None, device: str) -> ImageRewards:
    """Build the rewards of a run on a device, with the engine of its judge if it has one.

    Raises as `build_image_reward`.
    """
    # A model that is in both rewards is in memory once.
    by_name: dict[str, Callable[..., Any]] = {}

    def build(setting: str, terms: Mapping[str, float]) -> Callable[..., Any]:
        is_sum = list(terms.values()) != [1.0]
        labels = [_label(setting, name) for name in terms] if is_sum else list(terms)
        if len(set(labels)) < len(labels):
            raise UserError(
                f"{setting} has the names {', '.join(labels)}; expected names that differ"
            )
        for name in terms:
            if not by_name.get(name):
                by_name[name] = _reward(config, name, judge, device, setting, is_sum=is_sum)
        rewards = [by_name[name] for name in terms]
        if not is_sum:
            return rewards[0]
        if any(map(takes_latents, rewards)):
            raise UserError(
                f"{setting} is a sum; expected rewards of images, not of latents, in it"
            )
        weights = dict(zip(labels, terms.values(), strict=True))
        return ImageCompositeReward(dict(zip(labels, rewards, strict=True)), weights=weights)

    gradient = reward_gradient(config)
    trained = (
        make_latents_reward(gradient)
        if gradient
        else build("reward.kind", config.reward.trained_weights or {"digit": 1.0})
    )
    held_out = None
    if config.reward.measured_weights:
        held_out = build("reward.held_out", config.reward.measured_weights)
    return ImageRewards(trained=trained, held_out=held_out)


def _reward(
    config: DiffusionConfig,
    name: str,
    judge: Engine | None,
    device: str,
    setting: str,
    *,
    is_sum: bool,
) -> Callable[..., Any]:
    reward = config.reward.find_reward(name)
    if reward.kind == "judge":
        assert judge is not None
        return FrameReward(_judge_reward(config, judge), num_frames=config.reward.num_frames)
    settings = ImageRewardSettings(
        path=reward.path,
        head=reward.head,
        text_key=config.reward.text_key,
        thresholds=config.reward.thresholds,
        num_frames=config.reward.num_frames,
        jpeg_size=config.reward.jpeg_size,
        device=device,
    )
    group = f"reward.models.{name}" if is_sum or name in config.reward.models else ""
    return build_image_reward(reward.kind, settings, setting=setting, group=group)


def _label(setting: str, name: str) -> str:
    """Return the name that a reward of a sum has in metrics."""
    label = name.rpartition(":")[2]
    if not label.isidentifier():
        raise UserError(
            f"{setting} has {name!r} in a sum; expected a name in reward.models, with this as its kind"
        )
    return label


def reward_gradient(config: DiffusionConfig) -> Callable[..., Any] | None:
    """Load the differentiable reward, of latents and prompts, if the algorithm needs its gradient."""
    function = config.reward.find_reward(config.reward.kind).kind
    if config.algorithm.name != "reward_gradient" or ".py:" not in function:
        return None
    return load_function(function, setting="reward.kind")


def _digit(_: ImageRewardSettings) -> Callable[..., Any]:
    from gcore_diffusion.demo.rewards import DigitReward

    return DigitReward()


def _digit_judge(_: ImageRewardSettings) -> Callable[..., Any]:
    from gcore_diffusion.demo.rewards import DemoJudgeReward

    return DemoJudgeReward()


def _colour(_: ImageRewardSettings) -> Callable[..., Any]:
    from gcore_diffusion.demo.digits import COLOURS

    return make_colour_reward(COLOURS)


for _name, _make in zip(DEMO_REWARDS, (_digit, _digit_judge, _colour), strict=True):
    register_image_reward(_name, ImageRewardKind(make=_make))


def _judge_reward(config: DiffusionConfig, engine: Engine) -> ImageJudgeReward:
    """Return the reward that asks an engine of the judge's model."""
    judge = config.reward.judge
    path, tokenizer = judge_model(config)
    try:
        vision = VisionProcessor.from_pretrained(path)
    except EngineModelError as error:
        raise UserError(f"reward.path is {str(path)!r}: {error}") from None

    def encode(question: str) -> list[int]:
        parts = [{"type": "image"}, {"type": "text", "text": question}]
        message = {"role": "user", "content": parts}
        try:
            text = render_chat(tokenizer, [message], add_generation_prompt=True, tokenize=False)
        except MessageError as error:
            raise UserError(f"reward.path is {str(path)!r}: {error}") from None
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    decode = partial(tokenizer.decode, skip_special_tokens=True)
    return ImageJudgeReward(
        model=judge.model(engine=engine, encode=encode, decode=decode, vision=vision),
        template=judge.question(),
        parse=judge.scores(),
        reduce=judge.reduce,
        unparsable_score=judge.unparsable_score,
    )


def make_latents_reward(gradient: Callable[..., Any]) -> Callable[..., NDArray[np.float64]]:
    """Return a reward of final latents by a differentiable one: the input by which training differentiates it."""
    import torch

    def score(
        latents: NDArray[np.float32], prompts: Sequence[str], _rows: Any
    ) -> NDArray[np.float64]:
        """Return scores [B] of latents [B, ...]."""
        with torch.no_grad():
            return gradient(torch.from_numpy(latents), prompts).double().numpy()

    score.__name__ = getattr(gradient, "__name__", "reward")
    return score
