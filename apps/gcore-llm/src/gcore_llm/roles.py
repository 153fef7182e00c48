"""The roles of a run, and the policy that its config names."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gcore_controller import DeviceTimers, TrainerClient
from gcore_llm.config import TrainConfig
from gcore_llm.sampling.engines import start_policy
from gcore_rollout import Engine, EnvironmentRole, RewardRunner, RolloutRoles, SamplingParams
from gcore_runs import NO_INSTRUMENTATION, Instrumentation, RunFolder, eos_token_ids
from gcore_trainer import MicroBatch


@dataclass(frozen=True, kw_only=True)
class SamplingRoles(RolloutRoles):
    """The roles that sample and score."""

    devices: DeviceTimers = field(default_factory=DeviceTimers)
    """Times the work of the policy's engines and of the training ranks."""


@dataclass(frozen=True, kw_only=True)
class Roles(SamplingRoles):
    """The roles that a controller holds."""

    learner: TrainerClient[MicroBatch]
    owns_process: bool = False
    """Whether only the controller computes in its process."""


def policy_folder(config: TrainConfig, run: RunFolder) -> Path:
    """Return the folder of the model that a run starts from."""
    return Path(config.model) if config.model else run.model


def sampling_params(config: TrainConfig) -> SamplingParams:
    """Return how a run samples responses."""
    return SamplingParams(max_tokens=config.data.max_response_length, temperature=config.rollout.temperature)


async def build_engine(
    config: TrainConfig, model: Path, tokenizer: Any, *, instrumentation: Instrumentation = NO_INSTRUMENTATION
) -> Engine:
    """Start the policy's engine with the weights of a model folder."""
    eos = eos_token_ids(tokenizer, model)
    return await start_policy(config, model, eos_token_ids=eos, instrumentation=instrumentation)


def build_environment(config: TrainConfig, tokenizer: Any, reward: RewardRunner) -> EnvironmentRole | None:
    """Build the environment that the config names; see `MultiTurnConfig.build`."""
    prompt_key, on_error = config.data.prompt_key, config.reward_calls.on_error
    return config.rollout.multi_turn.build(tokenizer, reward, prompt_key=prompt_key, on_error=on_error)
