"""The role services of a run, built from its config."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gcore_controller import DeviceTimers, TrainerClient
from gcore_llm.config import TrainConfig
from gcore_llm.sampling.comparison import Comparison
from gcore_llm.sampling.engines import start_policy
from gcore_rollout import (
    ChatEncoder,
    Engine,
    Environment,
    EpisodeLimits,
    Failed,
    FailureLog,
    OnError,
    RevisionEnvironment,
    RewardRunner,
    Scored,
    load_function,
)
from gcore_runs.errors import UserError
from gcore_runs.loop.instrumented_engine import NO_INSTRUMENTATION, Instrumentation
from gcore_runs.run_folder import check_safetensors
from gcore_trainer import MicroBatch


@dataclass(frozen=True, kw_only=True)
class EnvironmentRole:
    """Environments in which the policy acts over several turns."""

    make: Callable[[Mapping[str, Any]], Environment]
    """Makes the environment of one episode from a row."""
    has_reward: bool
    """Whether its rewards are complete; otherwise the run's reward scores the last turn, in addition."""
    encoder: ChatEncoder
    limits: EpisodeLimits
    on_error: OnError
    """Reaction to an environment that fails."""
    failures: FailureLog = field(default_factory=FailureLog)
    """Failures of environments, with ``on_error`` "drop"."""


@dataclass(frozen=True, kw_only=True)
class SamplingRoles:
    """The roles that sample and score."""

    policy: Engine
    reward: RewardRunner
    tokenizer: Any
    comparison: Comparison | None = None
    """Scores the responses of a group against each other, in addition to the reward."""
    environment: EnvironmentRole | None = None
    """None: responses have one turn."""
    policy_slots: int | None = None
    """Most responses that the policy generates at once, if it is the controller's own; None: all controllers share it,
    and take no prompts from each other."""
    devices: DeviceTimers = field(default_factory=DeviceTimers)
    """Times the work of the policy's engines and of the training ranks."""


@dataclass(frozen=True, kw_only=True)
class Roles(SamplingRoles):
    """The roles that a controller holds."""

    learner: TrainerClient[MicroBatch]
    owns_process: bool = False
    """Whether only the controller computes in its process."""


def check_model(path: Path, *, setting: str = "model") -> None:
    """Check that a folder holds a model.

    Raises:
        UserError: not a Hugging Face folder with weights, or of an architecture that transformers does not know.
    """
    if not (path / "config.json").is_file():
        raise UserError(f"{setting} is {str(path)!r}; expected a Hugging Face folder with config.json")
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(path)
    except (ValueError, OSError) as error:
        raise UserError(f"model folder {path} has a config.json that does not load: {error}") from None
    if not any(path.glob("*.safetensors")) and not any(path.glob("pytorch_model*.bin")):
        raise UserError(f"model folder {path} has no weights; expected model.safetensors")
    check_safetensors(path)


def build_tokenizer(path: Path) -> Any:
    """Load the model folder's tokenizer.

    Raises:
        UserError: it has none, or one that does not load or has no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    if not any(
        (path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    ):
        raise UserError(
            f"model folder {path} has no tokenizer; expected tokenizer.json (save_pretrained of the tokenizer)"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:
        # The parsers raise errors of many types.
        raise UserError(
            f"model folder {path} has a tokenizer that does not load: {type(error).__name__}: {error}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(f"model folder {path}: its tokenizer has no eos_token, so no response could end")
    return tokenizer


def eos_token_ids(tokenizer: Any, model: Path | None) -> list[int]:
    """Return the tokens that end a response: the tokenizer's, and those of the model folder's generation settings."""
    declared = None
    if model is not None:
        generation = model / "generation_config.json"
        settings = generation if generation.is_file() else model / "config.json"
        declared = json.loads(settings.read_text()).get("eos_token_id")
    ids = {tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])}
    return sorted(i for i in ids if i is not None)


async def build_engine(
    config: TrainConfig, model: Path, tokenizer: Any, *, instrumentation: Instrumentation = NO_INSTRUMENTATION
) -> Engine:
    """Start the policy's engine with the weights of a model folder."""
    return await start_policy(
        config, model, eos_token_ids=eos_token_ids(tokenizer, model), instrumentation=instrumentation
    )


def build_environment(config: TrainConfig, tokenizer: Any, reward: RewardRunner) -> EnvironmentRole | None:
    """Build the environment that the config names; None: it names none.

    Raises:
        RewardError: it does not load.
    """
    multi_turn = config.rollout.multi_turn
    if multi_turn.max_revisions:
        make = partial(_revision, config, reward)
    elif multi_turn.environment:
        make = load_function(multi_turn.environment, setting="rollout.multi_turn.environment")
    else:
        return None
    return EnvironmentRole(
        make=make,
        has_reward=multi_turn.max_revisions > 0,
        encoder=ChatEncoder(tokenizer),
        limits=EpisodeLimits(
            max_turns=multi_turn.max_assistant_turns,
            max_tokens_per_turn=multi_turn.max_tokens_per_turn or None,
            step_timeout_s=multi_turn.step_timeout_s,
        ),
        on_error=config.reward_calls.on_error,
    )


def _revision(config: TrainConfig, reward: RewardRunner, row: Mapping[str, Any]) -> Environment:
    prompt = row[config.data.prompt_key]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

    async def score(completion: str) -> Scored:
        scored = await reward.score(prompt=str(messages[-1]["content"]), completion=completion, row=row)
        if isinstance(scored, Failed):
            raise scored.error
        return scored

    multi_turn = config.rollout.multi_turn
    return RevisionEnvironment(
        messages, score, good_enough=multi_turn.good_enough, max_revisions=multi_turn.max_revisions
    )
