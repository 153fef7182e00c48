"""Recipes of `gcore-llm train`: functions that return settings to start from."""

from collections.abc import Callable

from gcore_llm.config import (
    ActorConfig,
    DataConfig,
    TaskConfig,
    TrainConfig,
    WarmupConfig,
)
from gcore_llm.settings.rollout_config import RolloutConfig
from gcore_llm.settings.trainer_config import TrainerConfig
from gcore_trainer import OptimizerConfig, PolicyLossConfig


def embedded() -> TrainConfig:
    """Minutes on two cores, no GPU, no network: a tiny model learns to work out one-digit sums."""
    return TrainConfig(
        task=TaskConfig(name="chain_sum", params={"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}),
        answer_after="=",
        # Products of this size gain nothing from a second thread, and one gives the same numbers on every machine.
        threads=1,
        data=DataConfig(train_batch_size=32, max_prompt_length=16, max_response_length=32),
        warmup=WarmupConfig(max_steps=500),
        rollout=RolloutConfig(n=8, max_num_seqs=512),
        actor=ActorConfig(optim=OptimizerConfig(lr=2e-4), loss=PolicyLossConfig(), ppo_max_token_len=16_384),
        trainer=TrainerConfig(total_training_steps=300),
    )


def own_data() -> TrainConfig:
    """Your model, your prompts, your reward: set model, data.train_files and reward."""
    return TrainConfig()


RECIPES: dict[str, Callable[[], TrainConfig]] = {"embedded": embedded, "own_data": own_data}
