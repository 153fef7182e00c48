"""Settings of what scores responses, beside the reward function."""

import math
from dataclasses import dataclass, field
from typing import Literal

from gcore_llm.errors import UserError, check_at_least
from gcore_rollout.rewards import OnError, Reduce


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """How a generative reward model is asked, and read."""

    template: str = ""
    """File with the question: a text with {completion}, and as it likes {prompt} and columns of the row in braces;
    empty: how good the answer is, from 0 to 10."""
    n: int = 1
    """Verdicts on each response."""
    reduce: Reduce = "mean"
    """How several verdicts become one score."""
    temperature: float = 1.0
    """Of its sampling; 0: greedy."""
    max_response_length: int = 512
    """Longest verdict in tokens."""
    pattern: str = r"Score:\s*(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the score; its last match in a verdict counts."""
    low: float = 0.0
    """The score that becomes 0 ..."""
    high: float = 10.0
    """... and the one that becomes 1."""
    unparsable_score: float | None = None
    """What a verdict without a score counts as; unset: it is left out, and a response without any verdict takes its
    group out of training."""
    engine: Literal["hf", "vllm"] = "hf"
    """What the judge runs in."""
    num_processes: int = 0
    """Replicas of the judge, each a process of its own beside the policy's engine; 0: both share a process."""

    def __post_init__(self) -> None:
        for name, bound in (("n", 1), ("max_response_length", 1), ("num_processes", 0)):
            check_at_least(f"reward_model.judge.{name}", getattr(self, name), bound)
        if self.engine == "vllm" and not self.num_processes:
            raise UserError(
                "reward_model.judge.num_processes is 0 and reward_model.judge.engine is 'vllm': 1 or more is needed"
            )


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """A model that scores responses, alone or beside the reward function."""

    kind: Literal["none", "judge", "classifier", "server"] = "none"
    """judge: a language model asked for a verdict; classifier: a sequence classifier of one label, as gcore-llm
    reward-model makes it; server: posts JSON to a URL."""
    path: str = ""
    """The model's Hugging Face folder, or the server's URL."""
    weight: float = 1.0
    """The score is the reward function's, if there is one, plus this times the model's."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)

    def __post_init__(self) -> None:
        if (self.kind == "none") != (not self.path):
            raise UserError(
                f"reward_model.kind is {self.kind!r} and reward_model.path is {self.path!r}: "
                "a kind with a path is needed, or 'none' without"
            )
        if not (math.isfinite(self.weight) and self.weight):
            raise UserError(f"reward_model.weight is {self.weight}: a finite number other than 0 is needed")


@dataclass(frozen=True, kw_only=True)
class RewardCallsConfig:
    """How rewards are called."""

    max_concurrency: int = 1024
    """Most calls at one time."""
    timeout_s: float = 300.0
    """For one call of an asynchronous reward."""
    max_retries: int = 2
    """After a time-out or a broken connection."""
    on_error: OnError = "raise"
    """A reward that fails ends the run, or takes its group out of training."""
    in_threads: bool = False
    """Call a synchronous reward in a thread, so that generation goes on meanwhile: for one that takes long."""

    def __post_init__(self) -> None:
        check_at_least("reward_calls.max_concurrency", self.max_concurrency, 1)
        check_at_least("reward_calls.max_retries", self.max_retries, 0)
        if not self.timeout_s > 0:
            raise UserError(f"reward_calls.timeout_s is {self.timeout_s}: above 0 is needed")
