"""Settings of what is trained and from what: the policy, its adapters and teachers, the critic, and a warm-up."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from gcore_runs import (
    AdapterSettings,
    Amount,
    BaseActorConfig,
    Checked,
    Count,
    Fraction,
    NonNegative,
    Positive,
    UserError,
    above,
)
from gcore_trainer import (
    LossAggMode,
    OptimizerConfig,
    PolicyLossConfig,
    ValueLossConfig,
)

_ADAPTER_FILE = "adapter_config.json"
ANY_SOURCE = "*"


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
class ActorConfig(AdapterConfig, BaseActorConfig, section="actor"):
    """The policy's training."""

    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    checkpointed_layers: Fraction = 1.0
    """Share of the layers that are computed again where gradient checkpointing is on, the first ones; for torch."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """optimizer: optimizer states are in host memory, and updates run on the CPU: 6 instead of 18 bytes a bfloat16
    parameter on the device. all: parameters and gradients, too, while another model of the run is in use (the critic,
    the reference). Both for torch."""
    activation_offload: bool = False
    """Keep activations for the backward pass in host memory: with gradient checkpointing, the layers' inputs; for
    torch."""
    compile: bool = False
    """Compile the layers of all models in training (torch.compile), which takes a minute or more at the start, once for
    rows of all lengths; for torch, dense models, and without activation_offload."""
    router_replay: Literal["disabled", "R2"] = "disabled"
    """R2: in a mixture of experts, the updates of a step send tokens through the experts that they passed through when
    the old log-probs were computed, so that ratios do not jump where a router is near a tie."""
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


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(Checked, section="distillation"):
    """Teachers, whose log-probabilities of the policy's own responses the policy learns from."""

    teachers: tuple[str, ...] = ()
    """Models, by folder or by name, with the policy's tokenizer: the reverse KL divergence to them falls, token by
    token; with algorithm.adv-estimator distillation no reward is needed, with others it is added to the advantages."""
    coef: Positive = 1.0
    """Weight of that divergence next to the advantages of algorithm.adv-estimator."""
    weights: tuple[Positive, ...] = ()
    """Weight of each teacher's divergence, of which those for a prompt are divided by their sum; empty: all alike."""
    sources: tuple[str, ...] = ()
    """For each teacher, the source of the prompts that it teaches, or * for all; empty: all teach all prompts. Prompts
    of other sources learn from rewards alone."""
    source_key: str = "data_source"
    """Column that names a prompt's source, with distillation.sources."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("weights", "sources"):
            count = len(getattr(self, name))
            self.require(
                name,
                count in (0, len(self.teachers)),
                f"none, or {len(self.teachers)}, one for each teacher",
            )

    def check_with(self, adv_estimator: str, filter_groups: bool, *, is_simulated: bool) -> None:
        """Raise `UserError` for settings of the algorithm and the run that teachers do not fit."""
        if self.teachers and filter_groups:
            raise UserError(
                "algorithm.filter_groups is true; expected false with distillation.teachers, from which every group "
                "learns"
            )
        if not self.teachers and adv_estimator == "distillation":
            raise UserError(
                "algorithm.adv_estimator is 'distillation'; expected another one without distillation.teachers"
            )
        self.require("teachers", not (self.teachers and is_simulated), "none in a simulation")

    @property
    def read_column(self) -> str:
        """The column that is read of a row; empty: none is."""
        if not self.sources:
            return ""
        return self.source_key

    @property
    def roles(self) -> dict[str, str]:
        """The teachers by the names of their roles."""
        return {f"teacher-{number}": folder for number, folder in enumerate(self.teachers)}

    def shares(self, source: str) -> dict[str, float]:
        """Return the weights of the teachers of a source's prompts, by role; they sum to 1."""
        sources = self.sources or [ANY_SOURCE] * len(self.teachers)
        weights = self.weights or [1.0] * len(self.teachers)
        teachers = zip(self.roles, weights, sources, strict=True)
        role_weights = {
            role: weight for role, weight, taught in teachers if taught in (ANY_SOURCE, source)
        }
        total = sum(role_weights.values())
        return {role: weight / total for role, weight in role_weights.items()}


@dataclass(frozen=True, kw_only=True)
class CriticConfig(Checked, section="critic"):
    """The critic, where algorithm.adv-estimator is gae."""

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
    """Supervised fine-tuning of the embedded model on worked examples, before reinforcement learning."""

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
