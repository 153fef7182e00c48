"""Engines of images and of a judge: in this process, or in processes of their own."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gcore_diffusion.config import DiffusionConfig
from gcore_rollout import PRELOAD_DIFFUSERS, DiffusersEngine, Engine, engine_factory
from gcore_runs import UserError, build_tokenizer, check_model
from gcore_runs.engines import Instrumentation


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
    """Return what makes an engine of the judge, in this process or, pickled, in another; raises as `judge_model`."""
    import torch

    judge, (path, tokenizer) = config.reward.judge, judge_model(config)
    return engine_factory(
        judge.engine,
        path,
        device=config.engine_device,
        dtype=getattr(torch, judge.dtype),
        max_num_seqs=judge.max_num_seqs,
        eos_token_ids=[tokenizer.eos_token_id],
    )


def judge_model(config: DiffusionConfig) -> tuple[Path, Any]:
    """Return the folder of the judge's model, and its tokenizer; `UserError` if it cannot be asked about images."""
    path = Path(config.reward.path).absolute()
    check_model(path, setting="reward.path")
    tokenizer = build_tokenizer(path)
    if tokenizer.chat_template is None:
        raise UserError(f"reward.path is {str(path)!r}: its tokenizer has no chat template, which places the image")
    return path, tokenizer


async def start_engines(
    config: DiffusionConfig, model: Path, instrumentation: Instrumentation, to_close: AsyncExitStack, *, is_trial: bool
) -> tuple[Engine[Any, Any], Engine[Any, Any] | None]:
    """Start the policy's engine, and a judge's if the run has one: in this process, or several in their own.

    Args:
        model: the pipeline's folder.
        to_close: closes the engines.
        is_trial: start only one of each.
    """
    judge = config.reward.judge
    num_engines, num_judges = config.rollout.num_processes, judge.num_processes
    if is_trial:
        num_engines, num_judges = 0, int(judge.kind.needs_own_process)
    num_threads = max(1, config.threads // max(1, num_engines + num_judges))
    policy: Engine[Any, Any] = await instrumentation.start(
        sampler_factory(config, model=model), num_engines, num_threads=num_threads, preload=PRELOAD_DIFFUSERS
    )
    to_close.push_async_callback(policy.close)
    if not config.reward.is_judged:
        return policy, None
    judges: Engine[Any, Any] = await replace(instrumentation, role="judge").start(
        judge_factory(config), num_judges, num_threads=num_threads, preload=judge.kind.preload
    )
    to_close.push_async_callback(judges.close)
    return policy, judges
