"""Sections of the settings of gcore-llm's commands: data, what is trained and from what, and rewards."""

import math
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from gcore_rollout import OnError, ProcessLimits, RetryPolicy, RewardRunnerConfig
from gcore_runs import (
    AdapterSettings,
    Amount,
    BaseDataConfig,
    BaseOptimConfig,
    Bound,
    Checked,
    Count,
    Fraction,
    NonNegative,
    Positive,
    RLTrainerConfig,
    UserError,
    at_least,
)
from gcore_runs.settings.checks import above
from gcore_runs.settings.sections import EngineConfig, JudgeOptions, RanksConfig
from gcore_trainer import (
    LossAggMode,
    PolicyLossConfig,
    ValueLossConfig,
)

_ADAPTER_FILE = "adapter_config.json"
_OURS = ("add_generation_prompt", "continue_final_message", "messages", "tokenize", "tools")
"""Arguments of a template that gcore gives itself."""
_WEIGHT = Bound(lambda w: w and math.isfinite(w), "a finite number other than 0")
_RATE = Bound(lambda rate: rate is None or 0 < rate < math.inf, "a finite number above 0, or none")
_SHARE = Bound(
    lambda share: share == "auto" or 0 <= share <= 1, "auto, true, false, or a share in [0, 1]"
)
_PART_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class ChatDataConfig(BaseDataConfig):
    """Rows of text and chat messages, with images."""

    image_key: str = ""
    """Column of a row's images, for a vision-language model: one, or a list, each a path (relative to the data file), a
    URL of an object store (of fsspec), a data: URI, or the bytes of an image file, alone or in a struct {bytes, path};
    they stand where text has <image>, or a message a part of type image. Empty: none."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further variables of the model's chat template, wherever it is applied, such as
    --data.chat-template-kwargs.enable_thinking False."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.chat_template_kwargs.keys()
        self.require(
            "chat_template_kwargs",
            not names & set(_OURS),
            f"none of {', '.join(_OURS)}, which gcore gives",
        )


@dataclass(frozen=True, kw_only=True)
class DataConfig(ChatDataConfig):
    """Prompts: from your files, or from a task.

    Example:
        >>> data = DataConfig(train_files=("train.jsonl",), prompt_key="question", max_response_length=2048)
        >>> data.max_length
        3072
    """

    train_files: tuple[str, ...] = ()
    """Sources of prompts: JSONL, Parquet, Arrow or CSV files, patterns such as 'part-*.parquet', or splits on the
    Hugging Face Hub, hf://NAMESPACE/NAME[@REVISION][/SUBSET][:SPLIT]; the reward gets the other columns."""
    val_files: tuple[str, ...] = ()
    """Sources of held-out prompts, NAME=SOURCE for a set whose scores are apart, or published sets by name (gsm8k,
    math500, aime24, aime25, gpqa_diamond, mmlu_pro, humaneval); empty: data.val-size of the training prompts."""
    prompt_key: str = "prompt"
    """Column of the prompt: text, or a list of chat messages."""
    apply_chat_template: Literal["auto", "never"] = "auto"
    """auto: text becomes a user message wherever the tokenizer has a chat template."""
    train_batch_size: Count = 32
    """Prompts a step, each with rollout.n responses."""
    max_prompt_length: Count = 1024
    """Longest prompt in tokens; longer ones are left out, counted and reported."""
    max_response_length: Count = 512
    """Longest response in tokens."""
    num_workers: NonNegative = 0
    """Threads that read rows ahead."""

    @property
    def max_length(self) -> int:
        """Longest prompt and response together, in tokens."""
        return self.max_prompt_length + self.max_response_length


@dataclass(frozen=True, kw_only=True)
class TaskConfig(Checked, section="task"):
    """A reasoning-gym task, generated instead of read from files.

    Example:
        >>> from gcore_llm.data.tasks import make_problems
        >>> task = TaskConfig(name="chain_sum", params={"max_terms": 3}, num_train=100, num_val=10)
        >>> train, val = make_problems(task, seed=0)
        >>> len(val)
        10
    """

    name: str = ""
    """Task of reasoning-gym, such as chain_sum; empty: prompts come from data.train-files."""
    params: dict[str, Any] = field(default_factory=dict[str, Any])
    """The task's own settings, of the types that reasoning-gym gives them; on the command line --task.params.NAME and a
    number, true or false, text, several values, or a TOML value such as '{a = [1, 2]}'; None where it is accepted."""
    num_train: Count = 10_000
    """Training problems to generate; those that are also held out are left out."""
    num_val: Count = 256
    """Held-out problems to generate."""

    def check_only_source(self, train_files: tuple[str, ...], *, of: str) -> None:
        """Raise `UserError` if there are files, too."""
        if train_files and self.name:
            raise UserError(
                f"task.name is {self.name!r} and data.train_files is set; expected one source of {of}"
            )


@dataclass(frozen=True, kw_only=True)
class AdapterConfig(AdapterSettings):
    """Adapters that are trained in place of all parameters, in a folder of peft or merged into the model."""

    export_merged: bool = False
    """Export the model with the adapters merged into it, a Hugging Face folder; False: the adapters, a folder of
    peft."""

    @property
    def exports_adapters(self) -> bool:
        """True if the adapters alone are exported."""
        return self.lora_rank > 0 and not self.export_merged


@dataclass(frozen=True, kw_only=True)
class ActorOptimConfig(BaseOptimConfig):
    """AdamW or Muon, and a rate that warms up and then stays or decays to the run's end.

    Example:
        >>> optim = ActorOptimConfig(name="muon", lr=2e-4, muon_lr=1e-3)
        >>> optim.build(total_training_steps=500).muon_lr
        0.001
    """

    muon_lr: Annotated[float | None, _RATE] = None
    """Muon's rate; none: lr, which fits because its updates are scaled to the size of AdamW's (arXiv 2502.16982)."""


@dataclass(frozen=True, kw_only=True)
class ActorConfig(AdapterConfig, section="actor"):
    """The policy's training.

    Example:
        >>> ActorConfig(lora_rank=16).exports_adapters
        True
        >>> ActorConfig(lora_rank=16, export_merged=True).exports_adapters
        False
    """

    optim: ActorOptimConfig = field(default_factory=ActorOptimConfig)
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    enable_gradient_checkpointing: Annotated[bool | float | Literal["auto"], _SHARE] = "auto"
    """Keep only each layer's input for the backward pass and compute the rest again: less memory, a third more work;
    a share, such as 0.5: of the first layers, so many; for torch. auto: where a GPU of this machine is planned for, as
    few of the layers as fit (with megatron, MLPs and experts alone if that is enough); otherwise on CUDA for models of
    a billion parameters or more."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """optimizer: optimizer states are in host memory, and updates run on the CPU: 6 instead of 18 bytes a bfloat16
    parameter on the device. all: parameters and gradients, too, while another model of the run is in use (the critic,
    the reference); for torch."""
    activation_offload: bool = False
    """Keep activations for the backward pass in host memory: with gradient checkpointing, the layers' inputs; for
    torch."""
    compile: bool = False
    """Compile the layers of all models in training (torch.compile), which takes a minute or more at the start, once for
    rows of all lengths; for torch, dense models, and without activation_offload."""
    router_replay: Literal["disabled", "R2", "R3"] = "disabled"
    """Fix the experts of each token in a mixture of experts, so that ratios do not jump where a router is near a tie.
    R2: the updates of a step use those that the pass for the old log-probs chose. R3: both use those that the engine
    chose when it generated the token (arXiv 2510.11370), which hf and vllm return."""
    ppo_mini_batch_size: NonNegative = 0
    """Prompts an update; 0: the whole batch in one update."""
    ppo_epochs: Count = 1
    """Passes over the batch."""
    ppo_max_token_len: Count = 16_384
    """Most tokens a micro-batch: bounds memory, changes nothing else."""

    def __post_init__(self) -> None:
        super().__post_init__()
        keeps = self.optim.name != "muon" or self.offload == "none"
        self.require(
            "offload",
            keeps,
            "'none' with actor.optim.name 'muon', whose updates take too long on a CPU",
        )

    @property
    def has_checkpointing(self) -> bool | Literal["auto"]:
        """True if layers are computed again for the backward pass; auto: the device and the model decide."""
        share = self.enable_gradient_checkpointing
        return "auto" if share == "auto" else share > 0

    @property
    def checkpointed_layers(self) -> float:
        """Share of the layers that are computed again where gradient checkpointing is on, the first ones."""
        share = self.enable_gradient_checkpointing
        if share == "auto" or not share:
            return 1.0
        return float(share)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(RanksConfig, RLTrainerConfig):
    """Settings of training, of the run's length and of its output.

    Example:
        >>> TrainerConfig(schedule="one_step_off", total_epochs=2.0, num_processes=8).backend
        'torch'
    """

    schedule: Literal["sync", "one_step_off", "async"] = "sync"
    """sync: a step samples, then trains. one_step_off: the next step's batch is sampled while this one's is trained on,
    by the weights before it. async: batches are sampled without a pause, up to rollout.max-staleness steps ahead, and
    new weights come in the middle of responses; with rollout.partial-rollout a group starts as soon as another ends."""


@dataclass(frozen=True, kw_only=True)
class CriticConfig(Checked, section="critic"):
    """The critic, where algorithm.adv-estimator is gae.

    Example:
        >>> critic = CriticConfig(optim={"lr": 5e-6}, cliprange_value=0.2)
        >>> critic.loss.cliprange_value
        0.2
    """

    model: str = ""
    """A Hugging Face folder to start from; empty: the policy's, with a head of zeros."""
    optim: dict[str, Any] = field(default_factory=dict[str, Any])
    """Settings of its optimizer in place of actor.optim's, by their names; its lr is 1e-5 unless it is set."""
    cliprange_value: Annotated[float, above(0, "above 0")] = 0.5
    """A value moves at most this far from the one before the step's first update."""
    loss_agg_mode: LossAggMode = "token-mean"
    """Aggregation of token losses, as actor.loss.loss_agg_mode."""
    warmup_steps: NonNegative = 0
    """First steps that train the critic alone."""

    @property
    def loss(self) -> ValueLossConfig:
        """The loss of the values."""
        return ValueLossConfig(
            cliprange_value=self.cliprange_value, loss_agg_mode=self.loss_agg_mode
        )


@dataclass(frozen=True, kw_only=True)
class WarmupConfig(Checked, section="warmup"):
    """Supervised fine-tuning of the embedded model on worked examples, before reinforcement learning.

    Example:
        >>> warmup = WarmupConfig(max_steps=100, test_freq=20)
        >>> warmup.max_steps // warmup.test_freq  # most checks of the accuracy
        5
        >>> WarmupConfig(lr=0.0)
        Traceback (most recent call last):
            ...
        gcore_runs.errors.UserError: warmup.lr is 0.0; expected a finite number above 0
    """

    max_steps: NonNegative = 500
    """Most updates; 0: no warm-up."""
    batch_size: Count = 128
    """Worked examples an update."""
    lr: Positive = 2e-3
    """Learning rate."""
    target_accuracy: Amount = 0.4
    """Stop as soon as sampled answers reach this accuracy on held-out problems."""
    test_freq: Count = 25
    """Updates between two such checks."""


def drop_other_export(export: Path, settings: AdapterConfig) -> None:
    """Remove a run's export if it is of the other form, so that it is made again."""
    if (
        export.is_dir()
        and settings.lora_rank
        and (export / _ADAPTER_FILE).is_file() != settings.exports_adapters
    ):
        shutil.rmtree(export)


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(EngineConfig, JudgeOptions, section="reward_model.judge"):
    """A generative reward model: its engine, how it is asked, and how its verdicts are read.

    Example:
        >>> judge = JudgeConfig(pattern=r"Grade: ([0-9])", score_range=(1.0, 5.0))
        >>> read_score = judge.scores()
        >>> read_score("Mostly right. Grade: 4")
        0.75
    """

    method: Literal["score", "rubric", "steps", "all_pairs", "knockout", "swiss"] = "score"
    """score: a verdict on each response; rubric: on each criterion in the row's column rubric, and the weighted share
    of those that are met; steps: on each step, see reward_model.steps. The others compare responses of a group with
    each other, in both orders: every two (all_pairs), or those that meet in a knock-out or Swiss tournament. The share
    of wins is the score, and a tie is half a win. A group is compared when all its responses are there, in the step in
    which the last one is finished, and before groups whose scores are alike are dropped; on held-out prompts, the
    greedy response and the sampled one are compared. reward_calls.timeout_s is for all comparisons of a group."""
    template: str = ""
    """File with the question: a text with {completion}, of a rubric also with {criterion}, of steps with {step} (then
    the completion ends with it), or of a comparison with {completion_a} and {completion_b}, and optionally {prompt} and
    columns of the row in braces; empty: how good the answer is, from 0 to 10, how far it meets the criterion, whether
    the step is right, or which of the two is better."""
    pattern: str = ""
    """Regular expression whose first group is the score, or A, B or tie of a comparison; its last match in a verdict
    counts. Empty: "Score: 7", or "Winner: A"."""
    unparsable_score: float | None = None
    """Score of a verdict that cannot be read; unset: it is left out, and a response without any verdict, or with a
    criterion without any, takes its group out of training. Of a comparison 0.5, a tie, or unset."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.compares:
            return
        method = f"{self.section}.method {self.method!r}"
        is_tie = self.unparsable_score in (None, 0.5)
        self.require("unparsable_score", is_tie, f"0.5, a tie, or none with {method}")
        if (self.reduce, self.score_range) != ("mean", (0.0, 10.0)):
            raise UserError(
                f"{self.section}.reduce and score_range are {self.reduce!r} and {self.score_range}; expected their "
                f"defaults with {method}: they are of scores, comparisons have winners"
            )

    @property
    def compares(self) -> bool:
        """True if responses of a group are compared with each other."""
        return self.method not in ("score", "rubric", "steps")


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
        expected = "score or rubric: reward_model.judge alone compares responses or scores steps"
        self.require("method", self.method in ("score", "rubric"), expected)


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
    judges.NAME, on the command line --reward-model.judges.NAME.path and so on.

    Example:
        >>> judges = {"style": FurtherJudgeConfig(path="judges/style", weight=0.5)}
        >>> rewards = RewardModelConfig(kind="judge", path="judges/truth", judges=judges)
        >>> {name: judge.weight for name, judge in rewards.all_judges.items()}
        {'model': 1.0, 'style': 0.5}
    """

    kind: Literal["none", "judge", "classifier", "server"] = "none"
    """judge: a language model asked for a verdict; classifier: a sequence classifier of one label, as gcore-llm
    reward-model makes it, or a token classifier of two, which scores steps (a process reward model, as TRL's PRMTrainer
    makes it); server: posts JSON to a URL."""
    path: str = ""
    """The model's Hugging Face folder, or the server's URL."""
    weight: Annotated[float, _WEIGHT] = 1.0
    """The score is the reward function's, if there is one, plus this times the model's."""
    steps: Literal["min", "product", "last", "mean"] = "min"
    """How the scores of a response's steps become the model's score of it. With algorithm.adv_estimator grpo_process
    the policy learns from those of the steps instead, where the reward function's score is added to the last step's."""
    step_separator: Annotated[str, Bound(bool, "one or more characters")] = "\n\n"
    """The text between steps."""
    step_end: str = ""
    """The text after each step, as a classifier reads it, at whose last token it scores the step, such as <extra_0>;
    empty: the separator."""
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
    def compares(self) -> bool:
        return self.is_judge and self.judge.compares


@dataclass(frozen=True, kw_only=True)
class RewardCallsConfig(Checked, section="reward_calls"):
    """Calls of rewards.

    Example:
        >>> calls = RewardCallsConfig(max_retries=0, run_in="process", process_memory_gb=2.0)
        >>> calls.runner.retry.max_retries
        0
        >>> calls.process_limits.memory_bytes // 2**30
        2
    """

    max_concurrency: Annotated[int, at_least(1, "at least 1")] = 1024
    """Largest number of concurrent calls."""
    timeout_s: Annotated[float, above(0, "more than 0")] = 300.0
    """Time limit of one call of an asynchronous reward, or of one with run_in process, and of the trial call of any
    reward before the run starts."""
    max_retries: NonNegative = 2
    """Attempts after the first, if that timed out or lost its connection."""
    max_failed_share: Fraction = 0.0
    """A reward that fails takes its group out of training, up to this share of the rewards of a step, of small steps
    together 32 rewards; more end the run. 0: the first one does; 1: any may fail."""
    run_in: Literal["main", "thread", "process"] = "main"
    """Where a synchronous reward is called. main: where the controller runs, which waits for it. thread: in a thread,
    so that generation continues meanwhile: for one that takes long. process: in a process of its own, which is killed
    and started again if a call (of a reward that takes lists, a batch) takes longer than timeout_s; that call fails, as
    does one that takes more memory than process_memory_gb: see max_failed_share. math-verify and verifiers of tasks
    that compute always have one, with 10 seconds and 2 GB; beyond them a response scores 0."""
    process_memory_gb: Annotated[float, above(0, "more than 0")] = 4.0
    """With run_in process, the memory in GB that calls may take in addition to what the reward takes when it is
    loaded."""

    @property
    def on_error(self) -> OnError:
        """The consequence of a reward that fails: it ends the run, or drops its group."""
        return "drop" if self.max_failed_share else "raise"

    @property
    def process_limits(self) -> ProcessLimits | None:
        """The limits of a reward in a process of its own; None: it has none."""
        if self.run_in != "process":
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
            sync_in_threads=self.run_in == "thread",
        )
