"""Settings of reward models and of the calls of rewards."""

import math
import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from gcore_rollout import OnError, ProcessLimits, RetryPolicy, RewardRunnerConfig
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


_WEIGHT = Bound(lambda w: w and math.isfinite(w), "a finite number other than 0")
_PART_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class FurtherJudgeConfig(JudgeConfig, section="reward_model.judges.NAME"):
    """A generative reward model besides the others, with engines of its own; its score is the part of its name."""

    path: str = ""
    """The model's Hugging Face folder."""
    weight: Annotated[float, _WEIGHT] = 1.0
    """Its score is added to the others' times this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("path", self.path, "the folder of the judge's model")
        self.require(
            "pairwise", not self.pairwise, "false: reward_model.judge alone compares responses"
        )


@dataclass(frozen=True, kw_only=True)
class RunJudge:
    """A generative judge of a run, and where its settings are."""

    role: str
    """The role of its engines."""
    section: str
    path: str
    path_setting: str
    weight: float
    settings: JudgeConfig


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(Checked, section="reward_model"):
    """A model that scores responses, alone or together with the reward function. Further judges have a table each,
    judges.NAME, on the command line --reward-model.judges.NAME.path and so on."""

    kind: Literal["none", "judge", "classifier", "server"] = "none"
    """judge: a language model asked for a verdict; classifier: a sequence classifier of one label, as gcore-llm
    reward-model makes it; server: posts JSON to a URL."""
    path: str = ""
    """The model's Hugging Face folder, or the server's URL."""
    weight: Annotated[float, _WEIGHT] = 1.0
    """The score is the reward function's, if there is one, plus this times the model's."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    judges: dict[str, FurtherJudgeConfig] = field(default_factory=dict[str, FurtherJudgeConfig])
    """Further judges, by the names of their parts of the score, such as style: each has a path, a weight, and the
    settings of reward_model.judge."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.judges:
            if name in ("function", "model") or not _PART_NAME.fullmatch(name):
                raise UserError(
                    f"reward_model.judges has {name!r}; expected names of small letters, digits and _, other than "
                    "function and model, which are parts of the score already"
                )
        if (self.kind == "none") != (not self.path):
            raise UserError(
                f"reward_model.kind is {self.kind!r} and reward_model.path is {self.path!r}; expected a kind with a "
                "path, or 'none' without"
            )

    @property
    def all_judges(self) -> dict[str, RunJudge]:
        """All generative judges, by the names of their parts of the score: model, and those of further ones."""
        judges: dict[str, RunJudge] = {}
        if self.is_judge:
            judges["model"] = RunJudge(
                role="judge",
                section="reward_model.judge",
                path=self.path,
                path_setting="reward_model.path",
                weight=self.weight,
                settings=self.judge,
            )
        for name, settings in self.judges.items():
            section = f"reward_model.judges.{name}"
            judges[name] = RunJudge(
                role=f"judge_{name}",
                section=section,
                path=settings.path,
                path_setting=f"{section}.path",
                weight=settings.weight,
                settings=settings,
            )
        return judges

    @property
    def started_judges(self) -> dict[str, JudgeConfig]:
        """The judges whose engines the run starts, by the roles of these."""
        judges = self.all_judges.values()
        return {judge.role: judge.settings for judge in judges if not judge.settings.is_on_servers}

    @property
    def is_used(self) -> bool:
        return self.kind != "none" or bool(self.judges)

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
    """Time limit of one call of an asynchronous reward, or of one with in_process, and of the trial call of any reward
    before the run starts."""
    max_retries: NonNegative = 2
    """Attempts after the first, if that timed out or lost its connection."""
    on_error: OnError = "raise"
    """A reward that fails ends the run, or takes its group out of training."""
    max_failed_share: Fraction = 0.5
    """With on_error drop, the largest share of the rewards of a step that may fail, of small steps together 32 rewards;
    more end the run. 1: any."""
    in_threads: bool = False
    """Call a synchronous reward in a thread, so that generation continues meanwhile: for one that takes long."""
    in_process: bool = False
    """Call a synchronous reward in a process of its own, which is killed and started again if a call (of a reward that
    takes lists, a batch) takes longer than timeout_s; that call fails, as does one that takes more memory than
    process_memory_gb: see on_error. math-verify and verifiers of tasks that compute always have one, with 10 seconds
    and 2 GB; beyond them a response scores 0."""
    process_memory_gb: Annotated[float, above(0, "more than 0")] = 4.0
    """With in_process, the memory in GB that calls may take in addition to what the reward takes when it is loaded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(
            "in_process",
            not (self.in_process and self.in_threads),
            f"false with {self.section}.in_threads",
        )

    @property
    def process_limits(self) -> ProcessLimits | None:
        """The limits of a reward in a process of its own; None: it has none."""
        if not self.in_process:
            return None
        return ProcessLimits(
            call_s=self.timeout_s, memory_bytes=int(self.process_memory_gb * 2**30)
        )

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
