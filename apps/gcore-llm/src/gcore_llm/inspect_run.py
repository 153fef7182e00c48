"""Completions and held-out scores of a run's latest policy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from gcore_ckpt import Checkpointer, load
from gcore_llm.backend import build_engine, build_environment
from gcore_llm.config import TrainConfig
from gcore_llm.data.prompts import Problem, make_prompts
from gcore_llm.sampling.rewards import Evaluation, Rewards, evaluate
from gcore_llm.training import load_prompts
from gcore_rollout import Engine, Request, RolloutRoles, SamplingParams
from gcore_runs import RunFolder, UserError, build_tokenizer, check_model
from gcore_trainer import merge_lora


async def _latest_policy(path: Path) -> tuple[TrainConfig, Any, Engine, int]:
    """Return a run's config, tokenizer, engine with the weights of its last checkpoint, and that step; 0: none yet."""
    import torch

    run, config = RunFolder.opened(path, TrainConfig)
    torch.set_num_threads(config.threads)
    model = Path(config.model) if config.model else run.model
    if not config.model and not model.is_dir():
        raise UserError(
            f"{path} has no model yet: gcore-llm train is still warming it up, or was stopped before it had"
        )
    check_model(model)
    tokenizer = build_tokenizer(model)
    if config.rollout.is_on_servers:
        # The run may be in the middle of a step on them.
        config = replace(config, rollout=replace(config.rollout, engine="hf", urls=(), weights_dir=""))
    engine = await build_engine(config, model, tokenizer)
    checkpointer = Checkpointer(run.checkpoints)
    if not checkpointer.steps():
        return config, tokenizer, engine, 0
    saved = checkpointer.load(only=["step", "trainer.model"])
    weights = saved["trainer"]["model"].items()
    if config.actor.lora is not None:
        weights = merge_lora(load(model).items(), saved["trainer"]["model"], config.actor.lora)
    await engine.update_weights(weights, version=saved["step"])
    return config, tokenizer, engine, saved["step"]


async def sample_run(run: Path, prompt: str, *, n: int, temperature: float, max_tokens: int, seed: int) -> list[str]:
    """Complete a prompt ``n`` times."""
    config, tokenizer, engine, _ = await _latest_policy(run)
    [ready] = make_prompts([Problem(value=prompt, row={}, where="PROMPT")], tokenizer, config.data)
    request = Request(
        request_id="sample",
        prompt_token_ids=ready.token_ids,
        sampling=SamplingParams(max_tokens=max_tokens or config.data.max_response_length, temperature=temperature),
        n=n,
        seed=seed,
    )
    completions = [c async for c in engine.generate([request])]
    await engine.close()
    completions.sort(key=lambda c: c.index)
    return [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]


async def evaluate_run(run: Path) -> tuple[int, Evaluation]:
    """Return the step of a run's last checkpoint, and its scores on the held-out prompts.

    Raises:
        UserError: the run has no held-out prompts.
    """
    config, tokenizer, engine, step = await _latest_policy(run)
    prompts = load_prompts(config, tokenizer)
    if not prompts.val:
        raise UserError(f"{run} has no held-out prompts: it was trained with data.val_size=0 and no data.val_files")
    rewards = await Rewards.start(config)
    roles = RolloutRoles(
        policy=engine,
        reward=rewards.runner,
        tokenizer=tokenizer,
        environment=build_environment(config, tokenizer, rewards.runner),
    )
    result = await evaluate(roles, prompts.val, config)
    await rewards.close()
    await engine.close()
    return step, result
