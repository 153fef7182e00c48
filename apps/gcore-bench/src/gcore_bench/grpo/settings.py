"""The settings of a workload under gcore, from which those of its peers are derived."""

from dataclasses import replace
from typing import Any, Literal

from gcore_bench.grpo.workload import PROMPT_LENGTH, Workload
from gcore_llm.config import (
    ActorConfig,
    AlgorithmConfig,
    DataConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
    TrainerConfig,
)
from gcore_llm.data.prompts import PromptSets
from gcore_llm.data.tasks import load_task
from gcore_trainer import OptimizerConfig, PolicyLossConfig


def train_config(
    workload: Workload, *, engine: Literal["hf", "vllm"] = "hf", steps: int = 1, threads: int = 1, seed: int = 0
) -> TrainConfig:
    """Return gcore-llm's settings for a workload: plain GRPO, no dynamic sampling, one update a step."""
    return TrainConfig(
        reward=workload.reward,
        seed=seed,
        threads=threads,
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
        rollout=RolloutConfig(engine=engine, n=workload.n, max_num_seqs=workload.samples_per_step),
        algorithm=AlgorithmConfig(filter_groups=False),
        actor=ActorConfig(
            optim=OptimizerConfig(lr=workload.lr, grad_clip=workload.max_grad_norm), loss=PolicyLossConfig()
        ),
        trainer=TrainerConfig(total_training_steps=steps, save_freq=steps, test_freq=steps, tensorboard=False),
    )


def load_train_prompts(config: TrainConfig, tokenizer: Any) -> PromptSets:
    """Return the workload's prompts without validation prompts, so that no step evaluates."""
    return replace(load_task(config.task, config.data, tokenizer, seed=config.seed), val=[])
