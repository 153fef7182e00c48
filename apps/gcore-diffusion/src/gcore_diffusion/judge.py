"""A vision-language model that scores images: its engine, and what it is asked."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.reward_config import JudgeConfig
from gcore_diffusion.rewards import local_path
from gcore_rollout import (
    Engine,
    ImageJudgeReward,
    JudgeModel,
    SamplingParams,
    ScorePattern,
    UnsupportedModelError,
    VisionProcessor,
)
from gcore_runs.errors import UserError

_QUESTION = """How well does the image show this: {prompt}

Think about it briefly, then end with "Score: N", where N is a whole number from 0 to 10.
"""


def judge_factory(config: DiffusionConfig) -> Callable[[], Engine]:
    """What makes an engine of the judge, in this process or, pickled, in another.

    Raises:
        UserError: the folder has no such model.
    """
    import torch

    path, judge = local_path(config.reward, "judge").absolute(), config.reward.judge
    tokenizer = _tokenizer(path)
    options: dict[str, Any] = {
        "dtype": getattr(torch, judge.dtype),
        "max_num_seqs": judge.max_num_seqs,
        "eos_token_ids": [tokenizer.eos_token_id],
    }
    if judge.engine == "vllm":
        from gcore_rollout import VLLMEngine

        return partial(VLLMEngine.from_pretrained, path, **options)
    from gcore_rollout import HFEngine

    return partial(HFEngine.from_pretrained, path, device=config.engine_device, **options)


def judge_reward(path: Path, config: JudgeConfig, engine: Engine) -> ImageJudgeReward:
    """The reward that asks an engine of the model in this folder.

    Raises:
        UserError: the folder has no such model, or there is no such template.
        RewardConfigError: the template or the pattern cannot be used.
    """
    tokenizer = _tokenizer(path)
    try:
        vision = VisionProcessor.from_pretrained(path)
    except UnsupportedModelError as error:
        raise UserError(f"reward.path is {str(path)!r}: {error}") from None

    def encode(question: str) -> list[int]:
        parts = [{"type": "image"}, {"type": "text", "text": question}]
        message = {"role": "user", "content": parts}
        text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    model = JudgeModel(
        engine=engine,
        encode=encode,
        decode=partial(tokenizer.decode, skip_special_tokens=True),
        sampling=SamplingParams(max_tokens=config.max_response_length, temperature=config.temperature),
        n=config.n,
        vision=vision,
    )
    return ImageJudgeReward(
        model=model,
        template=_template(config),
        parse=ScorePattern(pattern=config.pattern or ScorePattern.pattern, low=config.low, high=config.high),
        reduce=config.reduce,
        unparsable_score=config.unparsable_score,
    )


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    if not (path / "config.json").is_file():
        raise UserError(f"reward.path is {str(path)!r}: a Hugging Face folder of a vision-language model is needed")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"reward.path is {str(path)!r}: its tokenizer does not load: {error}") from None
    if tokenizer.chat_template is None:
        raise UserError(f"reward.path is {str(path)!r}: its tokenizer has no chat template, which places the image")
    return tokenizer


def _template(config: JudgeConfig) -> str:
    if not config.template:
        return _QUESTION
    try:
        return Path(config.template).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"reward.judge.template is {config.template!r}: {error}") from None
