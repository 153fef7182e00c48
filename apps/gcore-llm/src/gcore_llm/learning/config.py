"""Settings of the models in training: the policy and the critic, and the embedded model's warm-up."""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from gcore_llm.learning.adapters import AdapterConfig
from gcore_runs import Amount, BaseActorConfig, Checked, Count, Fraction, NonNegative, Positive
from gcore_trainer import OptimizerConfig, PolicyLossConfig, ValueLossConfig


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
    share_prefix: bool = True
    """Compute a prompt once in a micro-batch that has several of its responses; the result is the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        keeps = self.optim.name != "muon" or self.offload == "none"
        self.require("offload", keeps, "'none' with actor.optim.name 'muon', whose updates take too long on a CPU")


@dataclass(frozen=True, kw_only=True)
class CriticConfig(Checked, section="critic"):
    """The critic, where algorithm.adv-estimator is gae."""

    model: str = ""
    """A Hugging Face folder to start from; empty: the policy's, with a head of zeros."""
    optim: OptimizerConfig = field(default_factory=partial(OptimizerConfig, lr=1e-5))
    loss: ValueLossConfig = field(default_factory=ValueLossConfig)
    warmup_steps: NonNegative = 0
    """First steps that train the critic alone."""


@dataclass(frozen=True, kw_only=True)
class WarmupConfig(Checked, section="warmup"):
    """Supervised fine-tuning of the embedded model on worked examples, before reinforcement learning."""

    max_steps: NonNegative = 0
    """Most updates; 0: no warm-up."""
    batch_size: Count = 128
    """Worked examples an update."""
    lr: Positive = 2e-3
    """Learning rate."""
    target_accuracy: Amount = 0.4
    """Stop as soon as sampled answers reach this accuracy on held-out problems."""
    test_freq: Count = 25
    """Updates between two such checks."""
