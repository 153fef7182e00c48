"""Engines of images and of a judge: in this process, or in processes of their own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gcore_diffusion.config import DiffusionConfig
from gcore_rollout import PRELOAD_DIFFUSERS, DiffusersEngine, Engine, engine_factory
from gcore_runs.engines import Instrumentation
from gcore_runs.errors import UserError


def sampler_factory(config: DiffusionConfig, *, model: Path) -> Callable[[], DiffusersEngine]:
    """Return what makes an engine of images, in this process or, pickled, in another."""
    rollout = config.rollout
    return partial(
        DiffusersEngine.from_pretrained,
        model.absolute(),
        device=config.engine_device,
        dtype=rollout.dtype,
        max_num_images=rollout.max_num_images,
        options=rollout.pipeline_options,
    )


def judge_factory(config: DiffusionConfig) -> Callable[[], Engine]:
    """Return what makes an engine of the judge, in this process or, pickled, in another."""
    import torch

    judge, path = config.reward.judge, judge_folder(config.reward.path)
    return engine_factory(
        judge.engine,
        path,
        device=config.engine_device,
        dtype=getattr(torch, judge.dtype),
        max_num_seqs=judge.max_num_seqs,
        eos_token_ids=[judge_tokenizer(path).eos_token_id],
    )


def judge_folder(path: str) -> Path:
    """Return the folder of the judge's model, or raise a `UserError` if none is set."""
    if not path:
        raise UserError("reward.path is not set; expected a local folder of a vision-language model for judge")
    return Path(path).absolute()


def judge_tokenizer(path: Path) -> Any:
    """Load the tokenizer of the judge's model, or raise a `UserError` if the folder has no such model."""
    from transformers import AutoTokenizer

    if not (path / "config.json").is_file():
        raise UserError(f"reward.path is {str(path)!r}; expected a Hugging Face folder of a vision-language model")
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"reward.path is {str(path)!r}: its tokenizer does not load: {error}") from None
    if tokenizer.chat_template is None:
        raise UserError(f"reward.path is {str(path)!r}: its tokenizer has no chat template, which places the image")
    return tokenizer


@dataclass(frozen=True, kw_only=True)
class Engines:
    """The engines of a run."""

    policy: Engine[Any, Any]
    judge: Engine[Any, Any] | None
    """None: the run has no judge."""

    async def close(self) -> None:
        await self.policy.close()
        if self.judge is not None:
            await self.judge.close()


async def start_engines(
    config: DiffusionConfig, model: Path, instrumentation: Instrumentation, *, is_trial: bool = False
) -> Engines:
    """Start each role's engine in this process, or several in their own, which are replaced if they die.

    Args:
        model: the pipeline's folder.
        is_trial: start only one of each.
    """
    judge = config.reward.judge
    num_engines, num_judges = config.rollout.num_processes, judge.num_processes
    if is_trial:
        num_engines, num_judges = 0, int(judge.kind.needs_own_process)
    num_threads = max(1, config.threads // max(1, num_engines + num_judges))

    policy: Engine[Any, Any] = await replace(instrumentation, role="engine").start(
        sampler_factory(config, model=model), num_engines, num_threads=num_threads, preload=PRELOAD_DIFFUSERS
    )
    if not config.reward.is_judged:
        return Engines(policy=policy, judge=None)
    try:
        judges: Engine[Any, Any] = await replace(instrumentation, role="judge").start(
            judge_factory(config), num_judges, num_threads=num_threads, preload=judge.kind.preload
        )
        return Engines(policy=policy, judge=judges)
    except BaseException:
        await policy.close()
        raise
