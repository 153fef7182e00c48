"""The settings of a workload under gcore, from which those of its peers are derived, and the model that all train."""

import asyncio
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from gcore_bench.grpo.measure import Step
from gcore_bench.grpo.workload import PROMPT_LENGTH, Task
from gcore_llm import ActorConfig
from gcore_llm.config import (
    AlgorithmConfig,
    DataConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
    TrainerConfig,
    WarmupConfig,
)
from gcore_llm.data.tasks import load_task
from gcore_llm.prompts import PromptSets
from gcore_runs import resolve
from gcore_runs.run_folder import RunFolder, write_atomically
from gcore_trainer import OptimizerConfig, PolicyLossConfig

MEAN_LENGTH = 50
"""Mean length of the long-tailed model's answers without a limit."""
_NUM_JUDGED = 256
_MODEL_SEED = 0


def train_config(task: Task) -> TrainConfig:
    """Return gcore-llm's settings for a task: plain GRPO, no dynamic sampling, one update a step."""
    workload, steps = task.workload, max(1, task.steps)
    return TrainConfig(
        reward=workload.reward,
        seed=task.seed,
        threads=task.threads,
        device="cpu",
        task=TaskConfig(
            name="chain_sum",
            params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            num_train=4096,
            # There are about two hundred such sums; those held out are not trained on.
            num_val=8,
        ),
        data=DataConfig(
            train_batch_size=workload.train_batch_size,
            max_prompt_length=PROMPT_LENGTH,
            max_response_length=workload.max_response_length,
        ),
        rollout=RolloutConfig(
            engine="vllm" if task.uses_vllm else "hf", n=workload.n, max_num_seqs=workload.samples_per_step
        ),
        algorithm=AlgorithmConfig(filter_groups=False),
        # The rate is so low that response lengths stay the same throughout a run.
        actor=ActorConfig(optim=OptimizerConfig(lr=1e-5, grad_clip=1.0), loss=PolicyLossConfig()),
        trainer=TrainerConfig(total_training_steps=steps, save_freq=steps, test_freq=steps, tensorboard=False),
    )


def load_train_prompts(config: TrainConfig, tokenizer: Any) -> PromptSets:
    """Return the workload's prompts without validation prompts, so that no step evaluates."""
    return replace(load_task(config.task, config.data, tokenizer, seed=config.seed), val=[])


def run(task: Task) -> list[Step]:
    """Make the model that the workload trains, and no steps."""
    task.model.parent.mkdir(parents=True, exist_ok=True)
    if task.workload.model == "warmed_up":
        _make_warmed_up(replace(task, seed=_MODEL_SEED))
    else:
        write_atomically(task.model, _write_long_tailed)
    return []


def _make_warmed_up(task: Task) -> None:
    """Fine-tune gcore-llm's tiny model until about four of ten sampled sums are correct."""
    from gcore_llm.finetune.warmup import make_warm_model
    from gcore_llm.sampling import reward_function
    from gcore_llm.tiny_model import tiny_tokenizer
    from gcore_rollout import RewardRunner
    from gcore_runs.loop.recorder import Display

    warmup = WarmupConfig(max_steps=400, target_accuracy=0.4, test_freq=10)
    config = resolve(train_config(task))
    run = RunFolder(task.model.with_name(f"{task.model.name}-run"))
    tokenizer = tiny_tokenizer()
    prompts = load_train_prompts(config, tokenizer)
    judged = replace(prompts, val=prompts.train[:_NUM_JUDGED])
    with Display() as display:
        reward = RewardRunner(reward_function(config), config.reward_calls.runner)
        asyncio.run(make_warm_model(config, run, judged, tokenizer, reward, display, warmup=warmup))
    run.model.rename(task.model)
    shutil.rmtree(run.path)


def _write_long_tailed(folder: Path) -> None:
    """Make gcore-llm's tiny model, untrained, end after every token with the same probability.

    Channel 0 of the embedding, which is tied to the head, is a constant: for any text it dominates that channel of the
    last hidden state, so that a token's value in it acts as a bias of its logit. The end of the sequence has the bias
    that makes its probability 1 / MEAN_LENGTH; tokens that are not printable characters are excluded.
    """

    import torch
    from transformers import AutoModelForCausalLM

    from gcore_llm.tiny_model import make_tiny_model
    from gcore_runs import build_tokenizer

    make_tiny_model(folder, seed=_MODEL_SEED)
    tokenizer = build_tokenizer(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    special = {tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id}
    printable = [i for i in range(len(tokenizer)) if i not in special]
    with torch.no_grad():
        channel_V = model.get_input_embeddings().weight[:, 0]
        channel_V.fill_(-1.0)
        channel_V[printable] = 1.0
        hidden_PC = model.model(torch.tensor(printable)[:, None]).last_hidden_state[:, 0]
        odds = len(printable) / (MEAN_LENGTH - 1)
        channel_V[tokenizer.eos_token_id] = 1.0 + math.log(odds) / hidden_PC[:, 0].mean()
    model.save_pretrained(folder)
