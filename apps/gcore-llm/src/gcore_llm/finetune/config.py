"""Every setting of `gcore-llm sft`, `reward-model` and `dpo`."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import tyro

from gcore_llm.config import TaskConfig
from gcore_runs.errors import UserError, check_at_least, check_port, check_run_name
from gcore_trainer import DPOConfig, LRSchedulerType, OptimizerConfig, RewardModelConfig


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, and a rate that warms up and then stays or decays to the run's end."""

    lr: float = 1e-5
    """Learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the moments."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    lr_warmup_steps: int = 0
    """The rate rises linearly over this many steps ..."""
    lr_warmup_steps_ratio: float = 0.0
    """... or over this share of the run; one of the two."""
    lr_scheduler_type: LRSchedulerType = "cosine"
    """Then it stays (constant), or falls to the run's last step (linear, cosine) ..."""
    min_lr_ratio: float = 0.0
    """... where this share of it is left."""
    grad_clip: float = 1.0
    """Largest global gradient norm; a larger one is scaled down to it."""

    def __post_init__(self) -> None:
        if not 0 <= self.lr_warmup_steps_ratio <= 1:
            raise UserError(
                f"optim.lr_warmup_steps_ratio is {self.lr_warmup_steps_ratio}: a number from 0 to 1 is needed"
            )
        if self.lr_warmup_steps and self.lr_warmup_steps_ratio:
            raise UserError(
                f"optim.lr_warmup_steps is {self.lr_warmup_steps} and optim.lr_warmup_steps_ratio "
                f"{self.lr_warmup_steps_ratio}: one of them is needed to be 0"
            )
        # Its own checks: bounds do not depend on how long the run is.
        self.build(total_training_steps=1)

    def build(self, *, total_training_steps: int) -> OptimizerConfig:
        """The trainer's settings for a run of this many steps."""
        warmup_steps = self.lr_warmup_steps or round(self.lr_warmup_steps_ratio * total_training_steps)
        return OptimizerConfig(
            lr=self.lr,
            betas=self.betas,
            weight_decay=self.weight_decay,
            lr_warmup_steps=warmup_steps,
            lr_scheduler_type=self.lr_scheduler_type,
            # A warm-up longer than the run is cut short by its end.
            total_training_steps=max(total_training_steps, warmup_steps + 1),
            min_lr_ratio=self.min_lr_ratio,
            grad_clip=self.grad_clip,
        )


@dataclass(frozen=True, kw_only=True)
class RowsConfig:
    """Rows of answers or pairs, under TRL's column names."""

    train_files: tuple[str, ...] = ()
    """JSONL or Parquet files."""
    val_files: tuple[str, ...] = ()
    """Held-out rows; none: data.val-size rows are taken out of the training files."""
    val_size: int = 256
    """How many rows to hold out if there are no val-files; never more than a tenth of them."""
    apply_chat_template: Literal["auto", "never"] = "auto"
    """auto: a prompt and its answer given as text become messages wherever the tokenizer has a chat template."""
    train_batch_size: int = 32
    """Rows a step."""
    max_length: int = 2048
    """Longest row in tokens, of a pair each side; longer ones are left out, counted and reported."""
    shuffle_seed: int = 0
    """Seed of the order of rows, and of which are held out."""

    def __post_init__(self) -> None:
        check_at_least("data.train_batch_size", self.train_batch_size, 1)
        check_at_least("data.max_length", self.max_length, 2)
        check_at_least("data.val_size", self.val_size, 0)
        check_at_least("data.shuffle_seed", self.shuffle_seed, 0)


@dataclass(frozen=True, kw_only=True)
class LengthConfig:
    """The run's length and what it leaves behind."""

    total_epochs: float = 1.0
    """Passes over the training rows, rounded up to whole steps."""
    total_training_steps: int = 0
    """Steps; 0: as many as total-epochs takes."""
    save_freq: int = 100
    """Steps between checkpoints."""
    max_ckpt_to_keep: int = 2
    """Checkpoints kept."""
    test_freq: int = 50
    """Steps between evaluations on held-out rows; the first and last step always evaluate."""
    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    prometheus_port: int = 0
    """Serve the metrics for Prometheus at http://PROMETHEUS-HOST:PORT/metrics; 0: do not."""
    prometheus_host: str = "127.0.0.1"
    """Address to serve them at; 127.0.0.1: to this machine alone."""

    def __post_init__(self) -> None:
        if not 0 < self.total_epochs < float("inf"):
            raise UserError(f"trainer.total_epochs is {self.total_epochs}: a finite number above 0 is needed")
        check_at_least("trainer.total_training_steps", self.total_training_steps, 0)
        check_port("trainer.prometheus_port", self.prometheus_port)
        for name in ("save_freq", "max_ckpt_to_keep", "test_freq"):
            check_at_least(f"trainer.{name}", getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True)
class FineTuneConfig:
    """What the three commands share."""

    rows_are_pairs: ClassVar[bool] = False
    command: Annotated[str, tyro.conf.Suppress] = ""
    """Which command's settings these are."""
    name: str = ""
    """The run's folder is RUNS_DIR/NAME."""
    runs_dir: str = "runs"
    """Where run folders are."""
    resume: Literal["auto", "never"] = "auto"
    """auto: go on with the run of this name; never: start over in a new folder NAME-2, NAME-3, ..."""
    model: str = ""
    """A local Hugging Face folder to begin with; empty: a tiny one is made."""
    seed: int = 0
    """Seed of the embedded model."""
    threads: int = 0
    """Threads of matrix products; 0: one a core."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations; the weights are float32."""
    enable_gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the rest again: less memory, a third more work."""
    max_token_len: int = 16_384
    """Most tokens a micro-batch: bounds memory, changes nothing else."""
    task: TaskConfig = field(default_factory=TaskConfig)
    data: RowsConfig = field(default_factory=RowsConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: LengthConfig = field(default_factory=LengthConfig)

    def __post_init__(self) -> None:
        check_at_least("threads", self.threads, 0)
        check_at_least("seed", self.seed, 0)
        check_run_name(self.name)
        sides = 2 if self.rows_are_pairs else 1
        if self.max_token_len < sides * self.data.max_length:
            product = f"{sides} * data.max_length" if sides > 1 else "data.max_length"
            raise UserError(
                f"max_token_len is {self.max_token_len}: at least {product} = {sides * self.data.max_length} is "
                "needed, so that every row fits a micro-batch"
            )
        if self.data.train_files and self.task.name:
            raise UserError(
                f"data.train_files and task.name={self.task.name!r} are both set: one source of rows is needed"
            )


@dataclass(frozen=True, kw_only=True)
class SFTRunConfig(FineTuneConfig):
    """Supervised fine-tuning on messages, on prompts with completions, or on text."""

    command: Annotated[Literal["sft"], tyro.conf.Suppress] = "sft"
    name: str = "sft"
    """The run's folder is RUNS_DIR/NAME."""


@dataclass(frozen=True, kw_only=True)
class PairsConfig(FineTuneConfig):
    """What the two commands share that learn from pairs."""

    rows_are_pairs: ClassVar[bool] = True
    warmup_steps: int = 0
    """Supervised updates of the embedded model on the task's worked examples, before the pairs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("warmup_steps", self.warmup_steps, 0)


@dataclass(frozen=True, kw_only=True)
class RewardModelRunConfig(PairsConfig):
    """Bradley-Terry training of a reward model on pairs of a chosen and a rejected answer."""

    command: Annotated[Literal["reward-model"], tyro.conf.Suppress] = "reward-model"
    name: str = "reward-model"
    """The run's folder is RUNS_DIR/NAME."""
    loss: RewardModelConfig = field(default_factory=RewardModelConfig)


@dataclass(frozen=True, kw_only=True)
class DPORunConfig(PairsConfig):
    """Direct preference optimisation of a policy on pairs of a chosen and a rejected answer."""

    command: Annotated[Literal["dpo"], tyro.conf.Suppress] = "dpo"
    name: str = "dpo"
    """The run's folder is RUNS_DIR/NAME."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-6))
    loss: DPOConfig = field(default_factory=DPOConfig)
