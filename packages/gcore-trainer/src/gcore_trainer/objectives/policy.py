"""Objectives of language models: their interface, the aggregation of token losses, and the objective of a policy.

An objective turns a micro-batch's scores into its part of the batch's loss. Parts add up, over micro-batches and over
ranks, so a batch's gradient does not depend on how it is split. Shapes: N response tokens of any number of sequences,
laid end to end.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Generic, Literal, TypeVar, assert_never

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import MAX_LOG_RATIO, check_finite_tokens
from gcore_trainer.advantages.reward_shaping import MAX_K3
from gcore_trainer.config import POLICY_LOSSES, KLPenalty, LossAggMode, PolicyLossConfig, has_dual_clip, require
from gcore_trainer.errors import BatchError, ConfigError
from gcore_trainer.sample import MicroBatch, Sample

_OPTIONAL = ("old_log_probs", "rollout_log_probs", "rollout_is_weights")


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """Scores of N response tokens in the samples' order. All shape [N], in float32 at least."""

    log_probs: torch.Tensor
    entropies: torch.Tensor
    """Entropy of the distribution that each token was drawn from, in nats."""


ScoresT = TypeVar("ScoresT", TokenScores, torch.Tensor)
"""The scores that a model gives: those of a policy, or a critic's values [N]."""
PartialLoss = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""A micro-batch's part of the loss, and of the sums that `Objective.metrics` turns into metrics."""


@dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """The denominators of a batch's loss; those of its parts add up."""

    num_sequences: int
    num_tokens: int
    """Tokens that count."""

    @classmethod
    def of(cls, masks: Sequence[NDArray[np.bool_]]) -> "BatchTotals":
        """Count sequences and tokens from the masks [R_i] of each sequence, True where a token counts."""
        return cls(num_sequences=len(masks), num_tokens=int(sum(m.sum() for m in masks)))

    def __add__(self, other: "BatchTotals") -> "BatchTotals":
        num_sequences = self.num_sequences + other.num_sequences
        return BatchTotals(num_sequences=num_sequences, num_tokens=self.num_tokens + other.num_tokens)


def aggregation_weights(
    masks: Sequence[NDArray[np.bool_]],
    mode: LossAggMode,
    *,
    totals: BatchTotals,
    max_response_length: int | None = None,
) -> list[NDArray[np.float32]]:
    """Return the weight of every token, such that the batch's loss is the plain sum of weight times token loss.

    Because the weights are fixed before the batch is split, the sum does not depend on how it is split into
    micro-batches, nor on samples left out because their gradient is known to be zero.

    - ``token-mean``: 1 / (tokens in the batch), DAPO (arXiv 2503.14476, eq. 8)
    - ``seq-mean-token-sum``: 1 / (sequences)
    - ``seq-mean-token-mean``: 1 / (sequences x tokens of the sequence), GRPO (arXiv 2402.03300, eq. 3)
    - ``seq-mean-token-sum-norm``: 1 / (sequences x max_response_length), Dr. GRPO (arXiv 2503.20783)

    Args:
        masks: [R_i] of each sequence of a part of the batch, True where a token counts.
        max_response_length: the divisor of ``seq-mean-token-sum-norm``; unused in other modes.

    Raises:
        ConfigError: the mode needs ``max_response_length``, and there is none.
    """
    match mode:
        case "token-mean":
            divisors = [max(totals.num_tokens, 1)] * len(masks)
        case "seq-mean-token-sum":
            divisors = [totals.num_sequences] * len(masks)
        case "seq-mean-token-mean":
            divisors = [totals.num_sequences * max(int(m.sum()), 1) for m in masks]
        case "seq-mean-token-sum-norm":
            if max_response_length is None:
                raise ConfigError(
                    "max_response_length is None; expected 1 or more for loss_agg_mode 'seq-mean-token-sum-norm'"
                )
            divisors = [totals.num_sequences * max_response_length] * len(masks)
        case _:
            assert_never(mode)
    return [(m * (1.0 / d)).astype(np.float32) for m, d in zip(masks, divisors, strict=True)]


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyTokens:
    """The tokens of a loss. All shape [N]; tokens that do not count have log-probabilities and advantages of 0."""

    log_probs: torch.Tensor
    """Log-probabilities under the policy, with their gradient."""
    old_log_probs: torch.Tensor
    """Log-probabilities under the policy before the step's first update: the ratio's denominator."""
    advantages: torch.Tensor
    mask: torch.Tensor
    """Bool, True where a token counts."""
    lengths: Sequence[int]
    """Tokens of each sequence; N in all."""

    @property
    def ratio(self) -> torch.Tensor:
        """exp(log_probs - old_log_probs), with its gradient."""
        return torch.exp((self.log_probs - self.old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


@dataclass(frozen=True, kw_only=True, eq=False)
class PolicyLoss:
    """The loss of every token, and what became of its ratio. All shape [N]."""

    loss: torch.Tensor
    ratio: torch.Tensor
    clipped: torch.Tensor
    """True where the upper or lower clip is active and cuts the gradient (in CISPO, the ratio alone)."""
    clipped_lower: torch.Tensor
    """True where the dual clip of a negative advantage is active."""


_loss_function = cache(POLICY_LOSSES.load)
_Function = Callable[[PolicyTokens, PolicyLossConfig], PolicyLoss | torch.Tensor]


def policy_loss_function(*, has_dual_clip: bool = False) -> Callable[[_Function], _Function]:
    """Declare that a function of `PolicyTokens` and a `PolicyLossConfig` reads ``clip_ratio_c``.

    It returns a `PolicyLoss`, or the losses [N] alone if it clips nothing.
    """

    def declared(function: _Function) -> _Function:
        function.__dict__["has_dual_clip"] = has_dual_clip
        return function

    return declared


def policy_loss(
    config: PolicyLossConfig,
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    mask: torch.Tensor,
    lengths: Sequence[int],
) -> PolicyLoss:
    """Compute the loss that ``config.loss_mode`` names, at every token; the arguments are those of `PolicyTokens`.

    Tokens that do not count have loss 0 and no gradient, even where they hold NaN.

    Raises:
        ConfigError: there is no such loss, no such file, or the file does not import.
        BatchError: a user's own loss has another shape than [N].
    """
    given = {"log_probs": log_probs, "old_log_probs": old_log_probs, "advantages": advantages}
    tokens = PolicyTokens(**{n: torch.where(mask, x, 0.0) for n, x in given.items()}, mask=mask, lengths=lengths)
    found = _loss_function(config.loss_mode)(tokens, config)
    if isinstance(found, torch.Tensor):
        nothing = torch.zeros_like(found, dtype=torch.bool)
        found = PolicyLoss(loss=found, ratio=tokens.ratio.detach(), clipped=nothing, clipped_lower=nothing)
    if found.loss.shape != mask.shape:
        raise BatchError(
            f"the policy loss has shape {tuple(found.loss.shape)}; expected that of its tokens, {tuple(mask.shape)}"
        )
    return found


def clipped_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, *, low: float, high: float) -> PolicyLoss:
    """Compute max(-A r, -A clip(r, 1 - low, 1 + high)): PPO (arXiv 1707.06347, eq. 7)."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    is_clipped = clipped > unclipped
    nothing = torch.zeros_like(is_clipped)
    return PolicyLoss(loss=torch.maximum(unclipped, clipped), ratio=ratio, clipped=is_clipped, clipped_lower=nothing)


class Objective(ABC, Generic[ScoresT]):
    """A loss over samples, which reads ``ScoresT`` of the model."""

    scores: ClassVar[Literal["tokens", "values"]]
    loss_name: ClassVar[str]
    """Metric of the loss; 0 for a batch in which no sample has a gradient."""
    entropy_grad: bool = False
    """The entropies need a gradient."""

    @abstractmethod
    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Raise `BatchError` for a field that is missing, or an entry that counts and is not finite."""

    def totals(self, samples: Sequence[Sample]) -> BatchTotals:
        """Return what these samples add to the batch's denominators."""
        return BatchTotals.of([s.mask for s in samples])

    def has_no_gradient(self, sample: Sample) -> bool:
        """Return whether the sample's gradient is known to be zero, so that it need not be computed."""
        return not sample.mask.any()

    @abstractmethod
    def partial_loss(self, scores: ScoresT, samples: MicroBatch, totals: BatchTotals) -> PartialLoss:
        """Compute the part of the batch's loss that these samples make up.

        Args:
            scores: of the samples' response tokens, in their order.
        """

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Make metrics of the batch's sums: those named ``mean:...`` are divided by ``count``, the others stay."""
        count = max(sums.get("count", 1.0), 1.0)
        return {self.loss_name: 0.0} | {
            name.removeprefix("mean:"): value / count if name.startswith("mean:") else value
            for name, value in sums.items()
            if name != "count"
        }


def on_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor of a device, without waiting for it.

    From ordinary memory torch copies to a GPU only when it has finished all that it was given, and waits; from pinned
    memory the copy takes its turn.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda" or not torch.cuda.is_available():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def mask_of(samples: MicroBatch, *, like: torch.Tensor) -> torch.Tensor:
    """Lay the samples' masks end to end: [N] bool, on the device of ``like``."""
    return on_device(np.concatenate([s.mask for s in samples]), like.device)


def field_of(samples: MicroBatch, field: str, *, like: torch.Tensor) -> torch.Tensor:
    """Lay a per-token array of the samples end to end: [N], like ``like``, and 0 where a token does not count."""
    # Not multiplied by 0: NaN times 0 is NaN, in the gradient too.
    values, mask = np.concatenate([getattr(s, field) for s in samples]), np.concatenate([s.mask for s in samples])
    return on_device(np.where(mask, values, 0.0), like.device).to(like.dtype)


def token_weights(
    samples: MicroBatch, mode: LossAggMode, longest: int | None, *, totals: BatchTotals, like: torch.Tensor
) -> torch.Tensor:
    """Lay the samples' `aggregation_weights` end to end: [N], on the device of ``like``."""
    weights = aggregation_weights([s.mask for s in samples], mode, totals=totals, max_response_length=longest)
    return on_device(np.concatenate(weights), like.device)


def named_scores(scores: TokenScores | torch.Tensor) -> torch.Tensor:
    """Return the main scores [N] of a model: a policy's log-probabilities, or a critic's values."""
    return scores.log_probs if isinstance(scores, TokenScores) else scores


def check_fields(micro_batches: Sequence[MicroBatch], loss: str, *fields: str) -> None:
    """Raise `BatchError` for a sample that lacks a field, which ``loss`` reads, or that fails `check_finite` in it."""
    for field in fields:
        if any(getattr(s, field) is None for batch in micro_batches for s in batch):
            raise BatchError(f"{field} is None; expected an array for every sample, which {loss} needs")
    check_finite_tokens(micro_batches, *fields)


def check_finite(micro_batches: Sequence[Sequence[Any]], *fields: str) -> None:
    """Check `Sample.check_finite` of every sample; an array that is None passes."""
    for i, batch in enumerate(micro_batches):
        for j, sample in enumerate(batch):
            sample.check_finite(f"micro_batches[{i}][{j}]", *fields)


def add_sums(sums: dict[str, Any], parts: Mapping[str, Any]) -> None:
    """Add a micro-batch's sums to those of the ones before it, by name and in float64."""
    for name, value in parts.items():
        sums[name] = sums.get(name, 0.0) + (value.double() if isinstance(value, torch.Tensor) else value)


def kl_penalty(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: KLPenalty) -> torch.Tensor:
    """Estimate KL(policy || reference) at every token, shape [N] (J. Schulman, "Approximating KL divergence", 2020).

    k1: log p - log q;  k2: (log p - log q)^2 / 2;  k3: q/p - 1 - log(q/p), GRPO's (arXiv 2402.03300, eq. 4), at most
    10 as in verl: a token at the bound has no gradient.

    k1 and, below its bound, k3 estimate the divergence without bias, but their gradients do not estimate its gradient
    (k1's is zero in expectation); k2's does, under the policy's own samples (arXiv 2510.01555). k1+ and k3+ have the
    value of k1 and k3 and the gradient of k2.
    """
    log_ratio = log_probs - ref_log_probs
    match kind:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            negative = (-log_ratio).clamp(-20.0, 20.0)
            return (negative.exp() - 1 - negative).clamp(max=MAX_K3)
        case "k1+" | "k3+":
            value = kl_penalty(log_probs.detach(), ref_log_probs, "k1" if kind == "k1+" else "k3")
            return value + log_ratio.square() / 2 - (log_ratio.square() / 2).detach()
        case _:
            assert_never(kind)


class PolicyObjective(Objective[TokenScores]):
    """The policy gradient losses, with their KL and entropy terms.

    Without a KL and an entropy term, samples whose advantages are all zero have no gradient. Metrics:
    ``actor/pg_loss``, ``actor/ppo_kl``, ``actor/pg_clipfrac``, ``actor/pg_clipfrac_lower``, ``actor/entropy``,
    ``actor/kl_loss``, ``training/rollout_probs_diff_mean``; the means are over the samples that have a gradient.
    """

    scores = "tokens"
    loss_name = "actor/pg_loss"

    def __init__(self, config: PolicyLossConfig) -> None:
        is_read = config.clip_ratio_c is None or has_dual_clip(config.loss_mode)
        require("clip_ratio_c", config.clip_ratio_c, is_read, f"None with loss_mode {config.loss_mode!r}")
        self._config = config
        self.entropy_grad = config.entropy_coeff > 0

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        check_fields(micro_batches, "the policy loss", "advantages")
        if self._config.kl_loss_coef:
            check_fields(micro_batches, f"kl_loss_coef={self._config.kl_loss_coef}", "ref_log_probs")
        for field in _OPTIONAL:
            if len({getattr(s, field) is None for batch in micro_batches for s in batch}) > 1:
                raise BatchError(f"{field} is None for some samples of the step; expected it for all of them or none")
        check_finite_tokens(micro_batches, *_OPTIONAL)

    def has_no_gradient(self, sample: Sample) -> bool:
        if self._config.kl_loss_coef or self._config.entropy_coeff or sample.advantages is None:
            return super().has_no_gradient(sample)
        return not sample.advantages[sample.mask].any()

    def partial_loss(self, scores: TokenScores, samples: MicroBatch, totals: BatchTotals) -> PartialLoss:
        config = self._config
        mask = mask_of(samples, like=scores.log_probs)
        log_probs, entropies = (torch.where(mask, x, 0.0) for x in (scores.log_probs, scores.entropies))
        current = log_probs.detach()
        longest = config.max_response_length
        weight_N = token_weights(samples, config.loss_agg_mode, longest, totals=totals, like=current)
        given = {f: field_of(samples, f, like=current) for f in _OPTIONAL if getattr(samples[0], f) is not None}
        old = given.get("old_log_probs", current)
        advantages = field_of(samples, "advantages", like=current)
        lengths = [s.response_ids.size for s in samples]
        policy = policy_loss(config, log_probs, old, advantages, mask=mask, lengths=lengths)
        importance = given.get("rollout_is_weights")
        pg_loss = (weight_N * (policy.loss if importance is None else importance * policy.loss)).sum()
        loss = pg_loss
        count = mask.float()
        sums = {
            "actor/pg_loss": pg_loss.detach(),
            "mean:actor/ppo_kl": (count * (old - current)).sum(),
            "mean:actor/pg_clipfrac": (mask & policy.clipped).sum(),
            "mean:actor/pg_clipfrac_lower": (mask & policy.clipped_lower).sum(),
            "mean:actor/entropy": (count * entropies.detach()).sum(),
            "count": count.sum(),
        }
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * (weight_N * entropies).sum()
        if config.kl_loss_coef:
            reference = field_of(samples, "ref_log_probs", like=current)
            kl_loss = (weight_N * kl_penalty(log_probs, reference, config.kl_loss_type)).sum()
            loss = loss + config.kl_loss_coef * kl_loss
            sums["actor/kl_loss"] = kl_loss.detach()
        if "rollout_log_probs" in given:
            difference = (current.exp() - given["rollout_log_probs"].exp()).abs()
            sums["mean:training/rollout_probs_diff_mean"] = (count * difference).sum()
        return loss, sums
