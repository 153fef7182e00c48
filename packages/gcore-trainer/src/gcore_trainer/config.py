"""Settings of optimizers, losses and adapters, each with its bounds."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from gcore_trainer.checks import require, require_choice
from gcore_trainer.registry import Registry

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLPenalty = Literal["k1", "k2", "k3", "k1+", "k3+"]
LRSchedulerType = Literal["constant", "linear", "cosine"]
DPOLossType = Literal["sigmoid", "ipo", "hinge"]

POLICY_LOSSES = Registry("gcore_trainer.losses.policy", "loss_mode")
"""The policy losses; asking for their names imports none of them."""

MAX_K3 = 10.0
"""Largest value of the k3 estimate of a token's KL divergence, in the loss and in the reward; verl's bound."""


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
        require("lr", self.lr, 0 < self.lr < math.inf, "a finite number above 0")
        require("betas", self.betas, len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas), "two in [0, 1)")
        require("eps", self.eps, 0 < self.eps < math.inf, "a finite number above 0")
        require("weight_decay", self.weight_decay, 0 <= self.weight_decay < math.inf, "a finite number, 0 or more")
        require("lr_warmup_steps", self.lr_warmup_steps, self.lr_warmup_steps >= 0, "0 or more")
        require_choice("lr_scheduler_type", self.lr_scheduler_type, get_args(LRSchedulerType))
        steps = self.total_training_steps
        accepted = f"more than lr_warmup_steps={self.lr_warmup_steps}, or 0 where it is not known yet"
        require("total_training_steps", steps, steps == 0 or steps > self.lr_warmup_steps, accepted)
        require("min_lr_ratio", self.min_lr_ratio, 0 <= self.min_lr_ratio <= 1, "a number in [0, 1]")
        require("grad_clip", self.grad_clip, self.grad_clip > 0, "above 0")
        require("max_nonfinite_steps", self.max_nonfinite_steps, self.max_nonfinite_steps >= 1, "1 or more")


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
        require("rank", self.rank, self.rank >= 1, "1 or more")
        require("alpha", self.alpha, self.alpha >= 1, "1 or more")
        require("target_modules", self.target_modules, bool(self.target_modules), "at least one name")


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
        for name in ("gamma", "lam"):
            require(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "a number in [0, 1]")


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
        require("clip_ratio_low", self.clip_ratio_low, 0 <= self.clip_ratio_low <= 1, "a number in [0, 1]")
        require("clip_ratio_high", self.clip_ratio_high, self.clip_ratio_high >= 0, "0 or more")
        POLICY_LOSSES.check(self.loss_mode)
        if self.clip_ratio_c is not None:
            require("clip_ratio_c", self.clip_ratio_c, self.clip_ratio_c > 1, "above 1, or None")
            has_dual_clip = getattr(POLICY_LOSSES.load(self.loss_mode), "has_dual_clip", False)
            accepted = f"None for loss_mode {self.loss_mode!r}, which has no dual clip"
            require("clip_ratio_c", self.clip_ratio_c, has_dual_clip, accepted)
        require("tau_pos", self.tau_pos, 0 < self.tau_pos < math.inf, "a finite number above 0")
        require("tau_neg", self.tau_neg, 0 < self.tau_neg < math.inf, "a finite number above 0")
        require_choice("loss_agg_mode", self.loss_agg_mode, get_args(LossAggMode))
        require("kl_loss_coef", self.kl_loss_coef, 0 <= self.kl_loss_coef < math.inf, "a finite number, 0 or more")
        require_choice("kl_loss_type", self.kl_loss_type, get_args(KLPenalty))
        require("entropy_coeff", self.entropy_coeff, 0 <= self.entropy_coeff < math.inf, "a finite number, 0 or more")
        if self.max_response_length is not None:
            require("max_response_length", self.max_response_length, self.max_response_length >= 1, "1 or more")


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
        require("cliprange_value", self.cliprange_value, self.cliprange_value > 0, "above 0")
        require_choice("loss_agg_mode", self.loss_agg_mode, get_args(LossAggMode))
        if self.max_response_length is not None:
            require("max_response_length", self.max_response_length, self.max_response_length >= 1, "1 or more")


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
        require("beta", self.beta, 0 < self.beta < math.inf, "a finite number above 0")
        require_choice("loss_type", self.loss_type, get_args(DPOLossType))
        require("label_smoothing", self.label_smoothing, 0 <= self.label_smoothing < 0.5, "a number in [0, 0.5)")


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """Bradley-Terry training of a reward model."""

    center_rewards_coefficient: float = 0.0
    """Weight of the squared sum of a pair's rewards, which keeps them around 0."""

    def __post_init__(self) -> None:
        coefficient = self.center_rewards_coefficient
        require("center_rewards_coefficient", coefficient, 0 <= coefficient < math.inf, "a finite number, 0 or more")
