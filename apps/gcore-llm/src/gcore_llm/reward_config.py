"""Settings of what scores responses, beside the reward function."""

import math
from dataclasses import dataclass, field
from typing import Literal

from gcore_llm.engine_config import EngineConfig
from gcore_rollout import OnError, Reduce
from gcore_runs.errors import UserError, check_at_least


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(EngineConfig):
    """How a generative reward model is asked, and read."""

    pairwise: bool = False
    """Compare every two responses of a group, each of them first once: the share of wins is the score, a tie is half
    a win. A group is compared when all its responses are there, in the step in which the last one is finished, and
    before groups whose scores are alike are dropped; on held-out prompts, the greedy response and the sampled one
    are compared. reward_calls.timeout_s is for all comparisons of a group."""
    template: str = ""
    """File with the question: a text with {completion}, or with {completion_a} and {completion_b} if pairwise, and as
    it likes {prompt} and columns of the row in braces; empty: how good the answer is, from 0 to 10, or which of the
    two is better."""
    n: int = 1
    """Verdicts on each question."""
    reduce: Reduce = "mean"
    """How several verdicts become one score."""
    temperature: float = 1.0
    """Of its sampling; 0: greedy."""
    max_response_length: int = 512
    """Longest verdict in tokens."""
    pattern: str = ""
    """Regular expression whose first group is the score, or A, B or tie if pairwise; its last match in a verdict
    counts. Empty: "Score: 7", or "Winner: A"."""
    low: float = 0.0
    """The score that becomes 0 ..."""
    high: float = 10.0
    """... and the one that becomes 1."""
    unparsable_score: float | None = None
    """What a verdict without a score counts as; unset: it is left out, and a response without any verdict takes its
    group out of training. If pairwise 0.5, a tie, or unset."""

    def __post_init__(self) -> None:
        self.check_engine("reward_model.judge")
        for name in ("n", "max_response_length"):
            check_at_least(f"reward_model.judge.{name}", getattr(self, name), 1)
        check_at_least("reward_model.judge.temperature", self.temperature, 0)
        if self.low == self.high:
            raise UserError(f"reward_model.judge.low and high are both {self.low}; expected two scores")
        if self.pairwise and self.unparsable_score not in (None, 0.5):
            raise UserError(
                f"reward_model.judge.pairwise is true and reward_model.judge.unparsable_score is "
                f"{self.unparsable_score}: 0.5, a tie, or none is needed"
            )
        if self.pairwise and (self.reduce, self.low, self.high) != ("mean", 0.0, 10.0):
            raise UserError(
                f"reward_model.judge.pairwise is true and reward_model.judge.reduce, low and high are "
                f"{self.reduce!r}, {self.low} and {self.high}: they are of scores, comparisons have winners"
            )
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
    """For one call of an asynchronous reward, and for the trial call of any reward before the run starts."""
    max_retries: int = 2
    """After a time-out or a broken connection."""
    on_error: OnError = "raise"
    """A reward that fails ends the run, or takes its group out of training."""
    max_failed_share: float = 0.5
    """With on_error drop, the largest share of the rewards of a step that may fail, of small steps together 32 rewards;
    more end the run. 1: any."""
    in_threads: bool = False
    """Call a synchronous reward in a thread, so that generation goes on meanwhile: for one that takes long."""

    def __post_init__(self) -> None:
        check_at_least("reward_calls.max_concurrency", self.max_concurrency, 1)
        check_at_least("reward_calls.max_retries", self.max_retries, 0)
        if not 0 <= self.max_failed_share <= 1:
            raise UserError(f"reward_calls.max_failed_share is {self.max_failed_share}; expected a number from 0 to 1")
        if not self.timeout_s > 0:
            raise UserError(f"reward_calls.timeout_s is {self.timeout_s}: above 0 is needed")
