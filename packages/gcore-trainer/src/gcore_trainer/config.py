"""Settings of optimizers, losses, adapters and layouts, each with its bounds."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from gcore_trainer.errors import ConfigError
from gcore_trainer.registry import Registry

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLPenalty = Literal["k1", "k2", "k3", "k1+", "k3+"]
LRSchedulerType = Literal["constant", "linear", "cosine"]
DPOLossType = Literal["sigmoid", "ipo", "hinge"]

POLICY_LOSSES = Registry("gcore_trainer.losses.policy", "loss_mode")
"""The policy losses; asking for their names imports none of them."""

MAX_K3 = 10.0
"""Largest value of the k3 estimate of a token's KL divergence, in the loss and in the reward; verl's bound."""


class Bound(NamedTuple):
    """A check of a setting, and what it accepts in words."""

    holds: Callable[[Any], bool]
    accepted: str

    def require(self, field: str, value: object) -> None:
        """Raise `ConfigError` for a value out of the bound."""
        require(field, value, self.holds(value), self.accepted)


ABOVE_ZERO = Bound(lambda v: 0 < v < math.inf, "a finite number above 0")
NOT_NEGATIVE = Bound(lambda v: 0 <= v < math.inf, "a finite number, 0 or more")
FRACTION = Bound(lambda v: 0 <= v <= 1, "a number in [0, 1]")
BELOW_ONE = Bound(lambda v: 0 <= v < 1, "a number in [0, 1)")
AT_LEAST_0 = Bound(lambda v: v >= 0, "0 or more")
AT_LEAST_1 = Bound(lambda v: v >= 1, "1 or more")


def one_of(literal: Any) -> Bound:
    """Return the bound of a setting that is one of a ``Literal``'s values."""
    choices = get_args(literal)
    return Bound(lambda v: v in choices, f"one of {', '.join(choices)}")


def require(field: str, value: object, holds: bool, accepted: str) -> None:
    """Check a setting.

    Raises:
        ConfigError: the check does not hold.
    """
    if not holds:
        raise ConfigError(f"{field} is {value!r}; expected {accepted}")


def require_bounds(settings: object, **bounds: Bound) -> None:
    """Check settings by the bounds of these fields.

    Raises:
        ConfigError: a setting is out of its bounds.
    """
    for field, bound in bounds.items():
        bound.require(field, getattr(settings, field))


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with gradient clipping, and a rate that warms up and then stays or decays."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    lr_warmup_steps: int = 0
    """Steps over which the rate rises linearly to ``lr``."""
    lr_scheduler_type: LRSchedulerType = "constant"
    """After the warm-up the rate stays (constant) or falls to ``min_lr_ratio * lr`` (linear, cosine)."""
    total_training_steps: int = 0
    """Update at which the rate ends; 0: not known yet, to be set before training."""
    min_lr_ratio: float = 0.0
    """Fraction of ``lr`` that is left at the end."""
    grad_clip: float = 1.0
    """Largest global gradient norm; a larger one is scaled down to it."""
    max_nonfinite_steps: int = 10
    """A step whose gradient is NaN or infinite is skipped; this many in a row end the run."""

    def __post_init__(self) -> None:
        warmup = self.lr_warmup_steps
        require_bounds(
            self,
            lr=ABOVE_ZERO,
            betas=Bound(lambda v: len(v) == 2 and all(0 <= b < 1 for b in v), "two in [0, 1)"),
            eps=ABOVE_ZERO,
            weight_decay=NOT_NEGATIVE,
            lr_warmup_steps=AT_LEAST_0,
            lr_scheduler_type=one_of(LRSchedulerType),
            total_training_steps=Bound(
                lambda v: v == 0 or v > warmup, f"more than lr_warmup_steps={warmup}, or 0 where it is not known yet"
            ),
            min_lr_ratio=FRACTION,
            grad_clip=Bound(lambda v: v > 0, "above 0"),
            max_nonfinite_steps=AT_LEAST_1,
        )


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters instead of full fine-tuning."""

    rank: int = 16
    """Rank of each adapter's matrices."""
    alpha: int = 32
    """An adapter's output is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ("all-linear",)
    """Names of the layers that get one, such as q_proj; all-linear: all but the head."""

    def __post_init__(self) -> None:
        require_bounds(self, rank=AT_LEAST_1, alpha=AT_LEAST_1, target_modules=Bound(bool, "at least one name"))


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """The settings that advantage estimators read."""

    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation, in grpo."""
    gamma: float = 1.0
    """Discount per token, in reinforce_plus_plus and gae."""
    lam: float = 1.0
    """Weight of longer horizons, in gae."""

    def __post_init__(self) -> None:
        require_bounds(self, gamma=FRACTION, lam=FRACTION)


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig:
    """The policy's loss. Names and meanings are verl's."""

    loss_mode: str = "vanilla"
    """PPO's clipped ratio (vanilla), a sequence's ratio (gspo), a clipped weight (cispo), a smooth gate (sapo), or a
    user's own (PATH.py:function)."""
    clip_ratio_low: float = 0.2
    """The ratio is clipped at 1 - clip_ratio_low."""
    clip_ratio_high: float = 0.28
    """The ratio is clipped at 1 + clip_ratio_high (DAPO's clip-higher)."""
    clip_ratio_c: float | None = None
    """Dual clip: bound of the loss of a negative advantage, in advantages; above 1."""
    tau_pos: float = 1.0
    """SAPO: steepness of the gate for advantages above 0."""
    tau_neg: float = 1.05
    """SAPO: steepness of the gate for other advantages."""
    loss_agg_mode: LossAggMode = "token-mean"
    """Aggregation of token losses (see `aggregation_weights`)."""
    kl_loss_coef: float = 0.0
    """Weight of the KL divergence to the reference policy in the loss; 0 needs no reference."""
    kl_loss_type: KLPenalty = "k3"
    """Estimator of that divergence; with a + its gradient is unbiased."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    max_response_length: int | None = None
    """Divisor of ``seq-mean-token-sum-norm``, which needs it: the longest response that the run allows."""

    def __post_init__(self) -> None:
        require_bounds(self, clip_ratio_low=FRACTION, clip_ratio_high=AT_LEAST_0)
        POLICY_LOSSES.check(self.loss_mode)
        if self.clip_ratio_c is not None:
            require("clip_ratio_c", self.clip_ratio_c, self.clip_ratio_c > 1, "above 1, or None")
            has_dual_clip = getattr(POLICY_LOSSES.load(self.loss_mode), "has_dual_clip", False)
            accepted = f"None for loss_mode {self.loss_mode!r}, which has no dual clip"
            require("clip_ratio_c", self.clip_ratio_c, has_dual_clip, accepted)
        require_bounds(
            self,
            tau_pos=ABOVE_ZERO,
            tau_neg=ABOVE_ZERO,
            loss_agg_mode=one_of(LossAggMode),
            kl_loss_coef=NOT_NEGATIVE,
            kl_loss_type=one_of(KLPenalty),
            entropy_coeff=NOT_NEGATIVE,
            max_response_length=Bound(lambda v: v is None or v >= 1, "1 or more"),
        )


@dataclass(frozen=True, kw_only=True)
class ValueLossConfig:
    """The critic's loss."""

    cliprange_value: float = 0.5
    """A value moves at most this far from the one before the step's first update."""
    loss_agg_mode: LossAggMode = "token-mean"
    """Aggregation of token losses (see `aggregation_weights`)."""
    max_response_length: int | None = None
    """Divisor of ``seq-mean-token-sum-norm``, which needs it: the longest response that the run allows."""

    def __post_init__(self) -> None:
        require_bounds(
            self,
            cliprange_value=Bound(lambda v: v > 0, "above 0"),
            loss_agg_mode=one_of(LossAggMode),
            max_response_length=Bound(lambda v: v is None or v >= 1, "1 or more"),
        )


@dataclass(frozen=True, kw_only=True)
class DPOConfig:
    """Direct preference optimisation."""

    beta: float = 0.1
    """Strength of the pull to the reference policy."""
    loss_type: DPOLossType = "sigmoid"
    """DPO's logistic loss (sigmoid), IPO's squared one (ipo), SLiC's (hinge)."""
    label_smoothing: float = 0.0
    """Assumed fraction of pairs with swapped labels, in sigmoid."""

    def __post_init__(self) -> None:
        below_half = Bound(lambda v: 0 <= v < 0.5, "a number in [0, 0.5)")
        require_bounds(self, beta=ABOVE_ZERO, loss_type=one_of(DPOLossType), label_smoothing=below_half)


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """Bradley-Terry training of a reward model."""

    center_rewards_coefficient: float = 0.0
    """Weight of the squared sum of a pair's rewards, which keeps them around 0."""

    def __post_init__(self) -> None:
        require_bounds(self, center_rewards_coefficient=NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes under verl's and Megatron's names; what they leave of the world is data parallel."""

    tensor_model_parallel_size: int = 1
    """Ranks that divide each layer's matrices (megatron)."""
    pipeline_model_parallel_size: int = 1
    """Ranks that divide the layers (megatron)."""
    virtual_pipeline_model_parallel_size: int = 1
    """Chunks of layers that each pipeline rank has, interleaved (megatron)."""
    context_parallel_size: int = 1
    """Ranks that divide the tokens of every sequence."""
    ulysses_sequence_parallel_size: int = 1
    """Ranks among these that exchange tokens for attention heads (Ulysses); the others pass keys and values (ring)."""
    expert_model_parallel_size: int = 1
    """Ranks that divide the experts of a mixture of experts (megatron)."""
    sequence_parallel: bool = False
    """Divide the tokens outside attention and MLP over the tensor-parallel ranks (megatron)."""

    def __post_init__(self) -> None:
        require_bounds(self, **{name: AT_LEAST_1 for name in vars(self) if name != "sequence_parallel"})
        if self.context_parallel_size % self.ulysses_sequence_parallel_size:
            raise ConfigError(
                f"ulysses_sequence_parallel_size is {self.ulysses_sequence_parallel_size}; expected a divisor of "
                f"context_parallel_size={self.context_parallel_size}"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ConfigError("sequence_parallel is true; expected tensor_model_parallel_size above 1")
        if self.virtual_pipeline_model_parallel_size > 1 and self.pipeline_model_parallel_size == 1:
            raise ConfigError(
                f"virtual_pipeline_model_parallel_size is {self.virtual_pipeline_model_parallel_size}; expected "
                "pipeline_model_parallel_size above 1"
            )

    def check_torch(self) -> None:
        """Raise `ConfigError` for a size that the torch backend does not have."""
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"):
            if (value := getattr(self, name)) > 1:
                raise ConfigError(f"{name} is {value}; expected 1 for the torch backend, or the megatron backend")

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same samples."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of groups of ranks that work on different samples.

        Raises:
            ConfigError: the sizes do not divide the world.
        """
        if world_size % self.model_parallel_size:
            sizes = " x ".join(
                f"{name}={getattr(self, name)}"
                for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
                if getattr(self, name) > 1
            )
            raise ConfigError(
                f"{sizes} is {self.model_parallel_size}; expected a divisor of the world of {world_size} ranks: "
                f"{self.model_parallel_size * max(1, world_size // self.model_parallel_size)} ranks would fit"
            )
        return world_size // self.model_parallel_size
