"""Settings of reward models and of the calls of rewards."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from gcore_rollout import OnError, RetryPolicy, RewardRunnerConfig
from gcore_runs import Bound, Checked, Fraction, NonNegative, UserError, above, at_least
from gcore_runs.engines import EngineConfig, JudgeOptions


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(EngineConfig, JudgeOptions, section="reward_model.judge"):
    """A generative reward model: its engine, how it is asked, and how its verdicts are read."""

    pairwise: bool = False
    """Compare every two responses of a group in both orders: the share of wins is the score, and a tie is half a win.
    A group is compared when all its responses are there, in the step in which the last one is finished, and before
    groups whose scores are alike are dropped; on held-out prompts, the greedy response and the sampled one are
    compared. reward_calls.timeout_s is for all comparisons of a group."""
    template: str = ""
    """File with the question: a text with {completion}, or with {completion_a} and {completion_b} if pairwise, and
    optionally {prompt} and columns of the row in braces; empty: how good the answer is, from 0 to 10, or which of the
    two is better."""
    pattern: str = ""
    """Regular expression whose first group is the score, or A, B or tie if pairwise; its last match in a verdict
    counts. Empty: "Score: 7", or "Winner: A"."""
    unparsable_score: float | None = None
    """Score of a verdict that cannot be read; unset: it is left out, and a response without any verdict takes its
    group out of training. If pairwise 0.5, a tie, or unset."""

    def __post_init__(self) -> None:
        super().__post_init__()
        prefix = self.section
        is_tie = not self.pairwise or self.unparsable_score in (None, 0.5)
        self.require("unparsable_score", is_tie, f"0.5, a tie, or none with {prefix}.pairwise")
        if self.pairwise and (self.reduce, self.low, self.high) != ("mean", 0.0, 10.0):
            raise UserError(
                f"{prefix}.reduce, low and high are {self.reduce!r}, {self.low} and {self.high}; expected their "
                f"defaults with {prefix}.pairwise: they are of scores, comparisons have winners"
            )


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(Checked, section="reward_model"):
    """A model that scores responses, alone or together with the reward function."""

    kind: Literal["none", "judge", "classifier", "server"] = "none"
    """judge: a language model asked for a verdict; classifier: a sequence classifier of one label, as gcore-llm
    reward-model makes it; server: posts JSON to a URL."""
    path: str = ""
    """The model's Hugging Face folder, or the server's URL."""
    weight: Annotated[float, Bound(lambda w: w and math.isfinite(w), "a finite number other than 0")] = 1.0
    """The score is the reward function's, if there is one, plus this times the model's."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.kind == "none") != (not self.path):
            raise UserError(
                f"reward_model.kind is {self.kind!r} and reward_model.path is {self.path!r}; expected a kind with a "
                "path, or 'none' without"
            )

    @property
    def is_judge(self) -> bool:
        return self.kind == "judge"

    @property
    def is_pairwise(self) -> bool:
        return self.is_judge and self.judge.pairwise


@dataclass(frozen=True, kw_only=True)
class RewardCallsConfig(Checked, section="reward_calls"):
    """Calls of rewards."""

    max_concurrency: Annotated[int, at_least(1, "at least 1")] = 1024
    """Largest number of concurrent calls."""
    timeout_s: Annotated[float, above(0, "more than 0")] = 300.0
    """Time limit of one call of an asynchronous reward, and of the trial call of any reward before the run starts."""
    max_retries: NonNegative = 2
    """Attempts after the first, if that timed out or lost its connection."""
    on_error: OnError = "raise"
    """A reward that fails ends the run, or takes its group out of training."""
    max_failed_share: Fraction = 0.5
    """With on_error drop, the largest share of the rewards of a step that may fail, of small steps together 32 rewards;
    more end the run. 1: any."""
    in_threads: bool = False
    """Call a synchronous reward in a thread, so that generation continues meanwhile: for one that takes long."""

    @property
    def runner(self) -> RewardRunnerConfig:
        """The settings of a `RewardRunner`."""
        return RewardRunnerConfig(
            max_concurrency=self.max_concurrency,
            timeout_s=self.timeout_s,
            retry=RetryPolicy(max_retries=self.max_retries),
            on_error=self.on_error,
            sync_in_threads=self.in_threads,
        )
