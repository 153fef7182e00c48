"""Off-policy correction between the policy that generated a batch and the trainer's own, before its first update.

An engine computes in another precision, with other kernels, or with weights some updates old. The ratio
pi_old / pi_rollout says how much, and is used in two ways: importance sampling weighs every token by it, rejection
sampling takes tokens and sequences out where it is far from 1. Names and meanings are verl's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import Collectives
from gcore_trainer.config import ABOVE_ZERO, Bound, require, require_bounds
from gcore_trainer.errors import BatchError, ConfigError
from gcore_trainer.sample import Sample, require_finite

RolloutIS = Literal["token", "sequence"]
_TokenRS = Literal["token_k1", "token_k2", "token_k3"]
_SequenceRS = Literal["seq_sum_k1", "seq_sum_k2", "seq_sum_k3", "seq_mean_k1", "seq_mean_k2", "seq_mean_k3"]
RolloutRS = Literal[_TokenRS, _SequenceRS, "seq_max_k2", "seq_max_k3"]

_MAX_LOG_RATIO = 20.0
"""Beyond this a ratio is a number that overflows sooner or later, and says nothing more."""

_Floats = NDArray[np.floating]
_Array = NDArray[np.float64]
_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, kw_only=True)
class RolloutCorrectionConfig:
    """The correction of a batch; with the defaults the mismatch is only measured."""

    rollout_is: RolloutIS | None = None
    """Importance sampling by each token's ratio (token) or by the product of a sequence's ratios (sequence)."""
    rollout_is_threshold: float = 2.0
    """A larger weight is truncated to this one."""
    rollout_is_threshold_lower: float | None = None
    """If this is set, a weight below it or above ``rollout_is_threshold`` becomes 0 instead (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Weights are divided by their mean over the batch."""
    rollout_rs: RolloutRS | None = None
    """Rejection by a divergence of each token, or by a sequence's sum, mean or maximum of it.

    With r the ratio: k1 is -log r, k2 is (log r)^2 / 2 and k3 is r - 1 - log r. seq_mean_k1 is the geometric mean.
    """
    rollout_rs_threshold: float | None = None
    """Upper bound, of a divergence in k2 and k3, of the inverse ratio pi_rollout / pi_old in k1; more is rejected."""
    rollout_rs_threshold_lower: float | None = None
    """Lower bound of the inverse ratio in k1; None: 1 / ``rollout_rs_threshold``."""
    rollout_token_veto_threshold: float | None = None
    """A sequence with a token whose ratio is below this is rejected as a whole."""

    def __post_init__(self) -> None:
        level, rule = self.rollout_is, self.rollout_rs
        limit, upper, lower = self.rollout_is_threshold, self.rollout_rs_threshold, self.rollout_rs_threshold_lower
        rules = get_args(RolloutRS)
        require_bounds(
            self,
            rollout_is=Bound(lambda v: v in (None, *get_args(RolloutIS)), "token, sequence or none"),
            rollout_is_threshold=ABOVE_ZERO,
            rollout_is_threshold_lower=Bound(
                lambda v: v is None or (level is not None and 0 < v <= limit),
                f"a number above 0 and up to rollout_is_threshold={limit}, and a rollout_is",
            ),
            rollout_is_batch_normalize=Bound(lambda v: not v or level is not None, "a rollout_is with it"),
            rollout_rs=Bound(lambda v: v in (None, *rules), f"one of {', '.join(rules)}, or none"),
            rollout_token_veto_threshold=Bound(lambda v: v is None or 0 < v < 1, "a number in (0, 1), or none"),
        )
        if rule is None:
            absent = Bound(lambda v: v is None, "none without a rollout_rs")
            require_bounds(self, rollout_rs_threshold=absent, rollout_rs_threshold_lower=absent)
            return
        is_above_zero = upper is not None and 0 < upper < math.inf
        require("rollout_rs_threshold", upper, is_above_zero, f"a finite number above 0 (rollout_rs is {rule!r})")
        assert upper is not None
        if not rule.endswith("k1"):
            accepted = f"none (rollout_rs is {rule!r}, which has no lower bound)"
            require("rollout_rs_threshold_lower", lower, lower is None, accepted)
        elif lower is None:
            require("rollout_rs_threshold", upper, upper >= 1, "1 or more, or a rollout_rs_threshold_lower with it")
        else:
            accepted = f"a number above 0 and up to rollout_rs_threshold={upper}"
            require("rollout_rs_threshold_lower", lower, 0 < lower <= upper, accepted)

    @property
    def is_active(self) -> bool:
        """True if anything is corrected."""
        return bool(self.rollout_is or self.rollout_rs or self.rollout_token_veto_threshold)


def rollout_correction(
    old_log_probs: Sequence[_Floats],
    rollout_log_probs: Sequence[_Floats],
    masks: Sequence[NDArray[np.bool_]],
    config: RolloutCorrectionConfig,
    *,
    batch: _Array | None = None,
) -> tuple[list[NDArray[np.float32]] | None, list[NDArray[np.bool_]], dict[str, float]]:
    """Compute importance weights of some samples, and their masks without rejected tokens.

    Truncated importance sampling weighs by min(pi_old / pi_rollout, C): F. Yao et al., "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training", 2025; with rejection: J. Liu et al., "When Speed Kills Stability:
    Demystifying RL Collapse from the Training-Inference Mismatch", 2025; IcePop: arXiv 2510.18855.

    Args:
        old_log_probs: [R_i] of each sample, of the trainer's policy before its first update.
        rollout_log_probs: [R_i] of each sample, of the policy that generated it.
        masks: [R_i] of each sample, the tokens that count.
        batch: `weight_moments` of the whole batch, for ``rollout_is_batch_normalize``. None: these samples are it.

    Returns:
        weights [R_i], 0 outside the given mask, None without ``rollout_is``; masks [R_i] without the rejected tokens;
        metrics of these samples under verl's names, before normalisation.

    Raises:
        BatchError: shapes that do not match, no token that counts, or one whose log-probability is not finite.
    """
    tokens = _Tokens.of(old_log_probs, rollout_log_probs, masks)
    metrics = _divergence_metrics(tokens)
    weights: list[NDArray[np.float32]] | None = None
    if config.rollout_is is not None:
        weights_N = _weights(tokens, config)
        metrics |= _weight_metrics(tokens, weights_N, config)
        if config.rollout_is_batch_normalize:
            total, count = (_weight_moments(tokens, weights_N, config) if batch is None else batch).tolist()
            factor = total / count if total > 1e-8 * count else 1.0
            metrics["rollout_is_batch_norm_factor"] = factor
            weights_N = weights_N / factor
        weights = tokens.scattered(weights_N.astype(np.float32), masks)
    kept_N = np.ones(tokens.log_ratio.size, np.bool_)
    if config.rollout_rs is not None:
        within_N, rejection_metrics = _within_thresholds(tokens, config.rollout_rs, config)
        kept_N &= within_N
        metrics |= rejection_metrics
    if config.rollout_token_veto_threshold is not None:
        is_vetoed_N = tokens.log_ratio < math.log(config.rollout_token_veto_threshold)
        is_vetoed_S = tokens.sums(is_vetoed_N) > 0
        kept_N &= ~tokens.spread(is_vetoed_S)
        metrics["rollout_is_catastrophic_token_fraction"] = float(is_vetoed_N.mean())
        metrics["rollout_is_veto_fraction"] = float(is_vetoed_S.mean())
    if config.rollout_rs is not None or config.rollout_token_veto_threshold is not None:
        metrics["rollout_rs_masked_fraction"] = float(1 - kept_N.mean())
        metrics["rollout_rs_seq_masked_fraction"] = float((tokens.sums(~kept_N) > 0).mean())
    return (
        weights,
        tokens.scattered(kept_N, masks),
        {f"rollout_corr/{name}": value for name, value in metrics.items()},
    )


async def with_rollout_correction(
    samples: Sequence[Sequence[Sample]], config: RolloutCorrectionConfig, group: Collectives
) -> tuple[list[list[Sample]], dict[str, float]]:
    """Add weights and masks against the mismatch of engine and trainer to samples with ``old_log_probs``.

    Args:
        samples: of each prompt of this process.

    Returns:
        the samples, and metrics of the whole batch.
    """
    counted = [s for part in samples for s in part if s.old_log_probs is not None and s.mask.any()]
    columns: dict[str, Any] = {
        "old_log_probs": [s.old_log_probs for s in counted],
        "rollout_log_probs": [s.rollout_log_probs for s in counted],
        "masks": [s.mask for s in counted],
    }
    batch = None
    if config.rollout_is_batch_normalize:
        own = weight_moments(**columns, config=config) if counted else np.zeros(2)
        batch = sum(await group.all_gather(own), np.zeros(2))
    weights, masks, metrics = rollout_correction(**columns, config=config, batch=batch) if counted else (None, [], {})
    place = {id(s): i for i, s in enumerate(counted)}

    def corrected(sample: Sample) -> Sample:
        i = place.get(id(sample))
        if i is None:
            nothing = np.zeros(sample.mask.shape, np.float32) if config.rollout_is else None
            return replace(sample, rollout_is_weights=nothing)
        return replace(sample, response_mask=masks[i], rollout_is_weights=None if weights is None else weights[i])

    everyones = await group.all_gather((len(counted), metrics))
    return [[corrected(s) for s in part] for part in samples], _combined(everyones)


def _combined(parts: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Combine the metrics of parts of a batch, given each one's number of samples."""
    combined: dict[str, float] = {}
    for name in sorted({name for _, metrics in parts for name in metrics}):
        found = [(count, metrics[name]) for count, metrics in parts if name in metrics]
        counts, values = zip(*found, strict=True)
        if name.endswith(("_max", "_min")):
            combined[name] = (max if name.endswith("_max") else min)(values)
        else:
            combined[name] = float(np.average(values, weights=counts))
    return combined


def weight_moments(
    old_log_probs: Sequence[_Floats],
    rollout_log_probs: Sequence[_Floats],
    masks: Sequence[NDArray[np.bool_]],
    config: RolloutCorrectionConfig,
) -> _Array:
    """Return sum and count of the weights, shape [2]; those of parts of a batch add up. A sequence may count as one.

    Raises:
        BatchError: as `rollout_correction`.
        ConfigError: there are no weights, ``rollout_is`` being none.
    """
    if config.rollout_is is None:
        raise ConfigError("rollout_is is None; expected token or sequence for weights")
    tokens = _Tokens.of(old_log_probs, rollout_log_probs, masks)
    return _weight_moments(tokens, _weights(tokens, config), config)


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """The N tokens that count of the S sequences that have any, laid end to end."""

    log_ratio: _Array
    """[N] log(pi_old / pi_rollout)."""
    old: _Array
    """[N]."""
    rollout: _Array
    """[N]."""
    counts: NDArray[np.int64]
    """[S]."""

    @classmethod
    def of(
        cls, old_log_probs: Sequence[_Floats], rollout_log_probs: Sequence[_Floats], masks: Sequence[NDArray[np.bool_]]
    ) -> "_Tokens":
        shapes = [[array.shape for array in arrays] for arrays in (old_log_probs, rollout_log_probs, masks)]
        if shapes[0] != shapes[2] or shapes[1] != shapes[2]:
            raise BatchError(f"old_log_probs, rollout_log_probs and masks have shapes {shapes}; expected equal shapes")
        counts = np.array([mask.sum() for mask in masks], np.int64)
        if not counts.any():
            raise BatchError(f"masks of {len(masks)} samples have no token that counts; expected at least one")
        for field, arrays in (("old_log_probs", old_log_probs), ("rollout_log_probs", rollout_log_probs)):
            for i, (array, mask) in enumerate(zip(arrays, masks, strict=True)):
                require_finite(f"{field}[{i}]", array, mask)
        old, rollout = (
            np.concatenate([array[mask] for array, mask in zip(arrays, masks, strict=True)]).astype(np.float64)
            for arrays in (old_log_probs, rollout_log_probs)
        )
        return cls(log_ratio=old - rollout, old=old, rollout=rollout, counts=counts[counts > 0])

    @property
    def starts(self) -> NDArray[np.int64]:
        """[S] index of each sequence's first token."""
        return np.cumsum(self.counts) - self.counts

    def sums(self, values_N: NDArray[np.float64 | np.bool_]) -> _Array:
        return np.add.reduceat(values_N.astype(np.float64), self.starts)

    def means(self, values_N: _Array) -> _Array:
        return self.sums(values_N) / self.counts

    def maxima(self, values_N: _Array) -> _Array:
        return np.maximum.reduceat(values_N, self.starts)

    def spread(self, values_S: NDArray[_Scalar]) -> NDArray[_Scalar]:
        """Repeat each sequence's value at its tokens: [N]."""
        return np.repeat(values_S, self.counts)

    def scattered(self, values_N: NDArray[_Scalar], masks: Sequence[NDArray[np.bool_]]) -> list[NDArray[_Scalar]]:
        """Distribute to samples: [R_i] of each, 0 outside its mask."""
        results = [np.zeros(mask.shape, values_N.dtype) for mask in masks]
        ends = np.cumsum([mask.sum() for mask in masks])
        for result, mask, part in zip(results, masks, np.split(values_N, ends[:-1]), strict=True):
            result[mask] = part
        return results


def _ratios(log_ratio: _Array) -> _Array:
    return np.exp(log_ratio.clip(-_MAX_LOG_RATIO, _MAX_LOG_RATIO))


def _raw_weights(tokens: _Tokens, config: RolloutCorrectionConfig) -> tuple[_Array, float]:
    """Return [N] ratios before any threshold, and the lower threshold."""
    lower, is_sequence = config.rollout_is_threshold_lower, config.rollout_is == "sequence"
    raw_N = _ratios(tokens.spread(tokens.sums(tokens.log_ratio)) if is_sequence else tokens.log_ratio)
    return raw_N, 1 / config.rollout_is_threshold if lower is None else lower


def _weights(tokens: _Tokens, config: RolloutCorrectionConfig) -> _Array:
    (raw_N, lower), upper = _raw_weights(tokens, config), config.rollout_is_threshold
    if config.rollout_is_threshold_lower is None:
        return np.minimum(raw_N, upper)
    return np.where((raw_N >= lower) & (raw_N <= upper), raw_N, 0.0)


def _weight_moments(tokens: _Tokens, weights_N: _Array, config: RolloutCorrectionConfig) -> _Array:
    weights = tokens.means(weights_N) if config.rollout_is == "sequence" else weights_N
    return np.array([weights.sum(), weights.size], np.float64)


def _weight_metrics(tokens: _Tokens, weights_N: _Array, config: RolloutCorrectionConfig) -> dict[str, float]:
    (raw_N, lower), upper = _raw_weights(tokens, config), config.rollout_is_threshold
    is_sequence = config.rollout_is == "sequence"
    raw = raw_N[tokens.starts] if is_sequence else raw_N  # one a sequence, where all its tokens share it
    extremes = raw if is_sequence else weights_N
    mean, weights_S = weights_N.mean(), tokens.means(weights_N)
    values = {
        "rollout_is_mean": mean,
        "rollout_is_max": extremes.max(),
        "rollout_is_min": extremes.min(),
        "rollout_is_std": weights_N.std(),
        "rollout_is_eff_sample_size": mean**2 / max(np.square(weights_N).mean(), 1e-16),
        "rollout_is_ratio_fraction_high": (raw > upper).mean(),
        "rollout_is_ratio_fraction_low": (raw < lower).mean(),
        "rollout_is_seq_mean": weights_S.mean(),
        "rollout_is_seq_max": weights_S.max(),
        "rollout_is_seq_min": weights_S.min(),
    }
    if config.rollout_is_threshold_lower is not None:
        values["rollout_is_oob_ratio"] = (weights_N == 0).mean()
    return {name: float(value) for name, value in values.items()}


def _within_thresholds(
    tokens: _Tokens, rule: RolloutRS, config: RolloutCorrectionConfig
) -> tuple[NDArray[np.bool_], dict[str, float]]:
    """[N] tokens that the rule keeps, and metrics of its statistic."""
    log_ratio_N = tokens.log_ratio.clip(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    level, _, estimator = rule.rpartition("_")
    match estimator:
        case "k1":
            statistic = -log_ratio_N
        case "k2":
            statistic = np.square(log_ratio_N) / 2
        case _:
            statistic = np.expm1(log_ratio_N) - log_ratio_N
    reduction = {"seq_sum": tokens.sums, "seq_mean": tokens.means, "seq_max": tokens.maxima}
    if level != "token":
        statistic = reduction[level](statistic)
    upper, lower = config.rollout_rs_threshold, config.rollout_rs_threshold_lower
    assert upper is not None
    if estimator == "k1":
        within = (statistic >= math.log(1 / upper if lower is None else lower)) & (statistic <= math.log(upper))
    else:
        within = statistic <= upper
    prefix = f"rollout_rs_{rule}"
    metrics = {
        f"{prefix}_mean": statistic.mean() if level == "token" else tokens.spread(statistic).mean(),
        f"{prefix}_max": statistic.max(),
        f"{prefix}_min": statistic.min(),
    }
    return within if level == "token" else tokens.spread(within), {k: float(v) for k, v in metrics.items()}


def _divergence_metrics(tokens: _Tokens) -> dict[str, float]:
    """Measure the mismatch of the policies: KL(rollout || old), perplexities, and chi-squared of the ratios."""
    old_S, rollout_S = -tokens.means(tokens.old), -tokens.means(tokens.rollout)
    difference_S = old_S - rollout_S
    ratio_N = _ratios(tokens.log_ratio)
    values = {
        "kl": -tokens.log_ratio.mean(),
        "k3_kl": (ratio_N - tokens.log_ratio - 1).mean(),
        "training_ppl": np.exp(old_S).mean(),
        "training_log_ppl": old_S.mean(),
        "rollout_ppl": np.exp(rollout_S).mean(),
        "rollout_log_ppl": rollout_S.mean(),
        "log_ppl_diff": difference_S.mean(),
        "log_ppl_abs_diff": np.abs(difference_S).mean(),
        "log_ppl_diff_max": difference_S.max(),
        "log_ppl_diff_min": difference_S.min(),
        "ppl_ratio": np.exp(difference_S).mean(),
        "chi2_token": np.square(ratio_N).mean() - 1,
        "chi2_seq": np.square(_ratios(tokens.sums(tokens.log_ratio))).mean() - 1,
    }
    return {name: float(value) for name, value in values.items()}
