"""Every setting of `gcore-llm sft`, `reward-model` and `dpo`."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import tyro

from gcore_llm.sections import ActorOptimConfig, AdapterConfig, ChatDataConfig, TaskConfig
from gcore_runs import (
    Bound,
    Count,
    Fraction,
    NonNegative,
    Positive,
    ReadWith,
    UserError,
    adapter_settings,
    at_least,
    one_of,
    schedule_settings,
)
from gcore_runs.settings.run_config import BaseRunConfig
from gcore_runs.settings.sections import BACKEND_SETTINGS, RanksConfig
from gcore_trainer import (
    DPOConfig,
    LRSchedulerType,
    OptimizerConfig,
    RewardModelLossConfig,
)


@dataclass(frozen=True, kw_only=True)
class OptimConfig(ActorOptimConfig):
    """AdamW or Muon, and a rate that warms up and then stays or decays to the run's end.

    Example:
        >>> optim = OptimConfig(lr=2e-5, lr_warmup_steps_ratio=0.1)
        >>> optim.build(total_training_steps=200).lr_warmup_steps
        20
    """

    lr: Positive = 1e-5
    """Learning rate."""
    lr_warmup_steps_ratio: Fraction = 0.0
    """Share of the run over which the rate rises linearly, if lr-warmup-steps is 0."""
    lr_scheduler_type: LRSchedulerType = "cosine"
    """After the warm-up, the rate stays (constant), or falls until the run's last step (linear, cosine)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr_warmup_steps and self.lr_warmup_steps_ratio:
            raise UserError(
                f"optim.lr_warmup_steps_ratio is {self.lr_warmup_steps_ratio}; expected 0 with optim.lr_warmup_steps "
                f"{self.lr_warmup_steps}"
            )

    def build(self, *, total_training_steps: int) -> OptimizerConfig:
        """Return the trainer's settings for a run of this many steps."""
        warmup_steps = self.lr_warmup_steps or round(
            self.lr_warmup_steps_ratio * total_training_steps
        )
        values = dict(vars(self))
        del values["lr_warmup_steps_ratio"]
        values["lr_warmup_steps"] = warmup_steps
        # A warm-up longer than the run is cut short by its end.
        return OptimizerConfig(
            **values, total_training_steps=max(total_training_steps, warmup_steps + 1)
        )


@dataclass(frozen=True, kw_only=True)
class RowsConfig(ChatDataConfig):
    """Rows of answers or pairs, under TRL's column names.

    Example:
        >>> rows = RowsConfig(train_files=("pairs.jsonl",), chat_template_kwargs={"enable_thinking": False})
        >>> DPORunConfig(model="model", data=rows).data.max_length
        2048
        >>> RowsConfig(max_length=1)
        Traceback (most recent call last):
            ...
        gcore_runs.errors.UserError: data.max_length is 1; expected 2 or more
    """

    val_size: NonNegative = 256
    """How many rows to hold out if there are no val-files; never more than a tenth of them."""
    apply_chat_template: Literal["auto", "never"] = "auto"
    """auto: a prompt and its answer given as text become messages wherever the tokenizer has a chat template."""
    max_length: Annotated[int, at_least(2)] = 2048
    """Longest row in tokens, of a pair each side; longer ones are left out, counted and reported."""


@dataclass(frozen=True, kw_only=True)
class LengthConfig(RanksConfig):
    """Training ranks, the run's length, its checkpoints and evaluations, and where its metrics go.

    Example:
        >>> LengthConfig(total_epochs=3.0, test_freq=50).total_training_steps  # 0: as many as the epochs take
        0
        >>> LengthConfig(save_freq=0)
        Traceback (most recent call last):
            ...
        gcore_runs.errors.UserError: trainer.save_freq is 0; expected 1 or more
    """

    total_epochs: Positive = 1.0
    """Passes over the training rows, rounded up to whole steps."""
    total_training_steps: NonNegative = 0
    """Steps; 0: as many as total-epochs takes."""
    save_freq: Count = 100
    """Steps between checkpoints."""


@dataclass(frozen=True, kw_only=True)
class FineTuneConfig(AdapterConfig, BaseRunConfig):
    """Settings that the three commands share."""

    may_change: ClassVar[tuple[str, ...]] = (
        *BaseRunConfig.may_change,
        "trainer.backend",
        "trainer.parallel",
        "trainer.megatron",
        "export_merged",
    )
    read_with: ClassVar[tuple[ReadWith, ...]] = (
        adapter_settings("", "export_merged"),
        ReadWith(settings=("optim.muon_lr",), chosen_by={"optim.name": one_of("muon")}),
        schedule_settings("optim"),
        *BACKEND_SETTINGS,
    )
    rows_are_pairs: ClassVar[bool] = False
    command: Annotated[str, tyro.conf.Suppress] = ""
    """Which command's settings these are."""
    name: str = ""
    """The run's folder is RUNS_DIR/NAME."""
    model: str = ""
    """A Hugging Face folder to start from, or NAMESPACE/NAME[@REVISION] on its Hub; empty: a tiny one is made."""
    seed: NonNegative = 0
    """Seed of the embedded model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of weights and activations; auto: bfloat16 on CUDA, else float32. In bfloat16, updates are made to
    float32 copies of the weights, and checkpoints hold these."""
    enable_gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Keep only each layer's input for the backward pass and compute the rest again: less memory, a third more work;
    auto: on CUDA for models of a billion parameters or more."""
    max_token_len: int = 16_384
    """Most tokens a micro-batch: bounds memory, changes nothing else."""
    task: TaskConfig = field(default_factory=TaskConfig)
    data: RowsConfig = field(default_factory=RowsConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: LengthConfig = field(default_factory=LengthConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.task.check_only_source(self.data.train_files, of="rows")
        is_plain = self.trainer.backend == "torch" or self.optim.name == "adamw"
        self.require(
            "optim.name", is_plain, f"'adamw' with trainer.backend {self.trainer.backend!r}"
        )
        sees = self.model and self.trainer.backend == "torch"
        self.require(
            "data.image_key",
            not self.data.image_key or (sees and self.trainer.parallel.context_parallel_size == 1),
            "'' without a model, with trainer.backend 'megatron' or with context parallelism",
        )
        longest = self.data.max_length
        product = "data.max_length"
        if self.rows_are_pairs:
            longest *= 2
            product = "2 * data.max_length"
        if self.max_token_len < longest:
            raise UserError(
                f"max_token_len is {self.max_token_len}; expected at least {product} = {longest}, so that every row "
                "fits a micro-batch"
            )


@dataclass(frozen=True, kw_only=True)
class SFTRunConfig(FineTuneConfig):
    """Fine-tune on messages, on prompts with completions, or on text.

    Example:
        >>> config = SFTRunConfig(model="model", data=RowsConfig(train_files=("rows.jsonl",)), lora_rank=16)
        >>> config.exports_adapters
        True
    """

    command: Annotated[Literal["sft"], tyro.conf.Suppress] = "sft"
    name: str = "sft"


@dataclass(frozen=True, kw_only=True)
class PairsConfig(FineTuneConfig):
    """Settings that the two commands share which learn from pairs."""

    read_with: ClassVar[tuple[ReadWith, ...]] = (
        *FineTuneConfig.read_with,
        ReadWith(
            settings=("warmup_steps",),
            chosen_by={"model": Bound(lambda model: not model, "'' (the embedded one)")},
        ),
    )
    rows_are_pairs: ClassVar[bool] = True
    warmup_steps: NonNegative = 0
    """Supervised updates of the embedded model on the task's worked examples, before the pairs."""


@dataclass(frozen=True, kw_only=True)
class RewardModelRunConfig(PairsConfig):
    """Train a reward model on pairs of a chosen and a rejected answer.

    Example:
        >>> config = RewardModelRunConfig(model="model", data=RowsConfig(train_files=("pairs.jsonl",)))
        >>> config.rows_are_pairs
        True
        >>> RewardModelRunConfig(lora_rank=8, trainer=LengthConfig(backend="megatron"))
        Traceback (most recent call last):
            ...
        gcore_runs.errors.UserError: lora_rank is 8; expected 0 with trainer.backend 'megatron'
    """

    command: Annotated[Literal["reward-model"], tyro.conf.Suppress] = "reward-model"
    name: str = "reward-model"
    loss: RewardModelLossConfig = field(default_factory=RewardModelLossConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("data.image_key", not self.data.image_key, "'': reward models see no images")
        backend = self.trainer.backend
        self.require(
            "lora_rank",
            backend == "torch" or not self.lora_rank,
            f"0 with trainer.backend {backend!r}",
        )


@dataclass(frozen=True, kw_only=True)
class DPORunConfig(PairsConfig):
    """Train a policy on pairs of a chosen and a rejected answer, without sampling and without a reward model.

    Example:
        >>> rows = RowsConfig(train_files=("pairs.jsonl",))
        >>> config = DPORunConfig(model="model", data=rows, loss=DPOConfig(beta=0.05))
        >>> config.loss.beta, config.optim.lr
        (0.05, 1e-06)
    """

    read_with: ClassVar[tuple[ReadWith, ...]] = (
        *PairsConfig.read_with,
        ReadWith(
            settings=("loss.label_smoothing",), chosen_by={"loss.loss_type": one_of("sigmoid")}
        ),
    )
    command: Annotated[Literal["dpo"], tyro.conf.Suppress] = "dpo"
    name: str = "dpo"
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-6))
    loss: DPOConfig = field(default_factory=DPOConfig)
