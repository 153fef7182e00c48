"""Off-policy correction between the policy that generated a batch and the trainer's own, before its first update.

An engine computes in another precision, with other kernels, or with weights some updates old. The ratio
pi_old / pi_rollout says how much, and is used in two ways: importance sampling weighs every token by it, rejection
sampling takes tokens and sequences out where it is far from 1. Names and meanings are verl's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import MAX_LOG_RATIO, AllGather
from gcore_trainer.config import RolloutCorrectionConfig
from gcore_trainer.errors import BatchError, ConfigError
from gcore_trainer.sample import Sample, require_finite

_EPSILON = 1e-8
_Floats = NDArray[np.floating]
_Array = NDArray[np.float64]
_Scalar = TypeVar("_Scalar", bound=np.generic)


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
    Demystifying RL Collapse from the Training-Inference Mismatch", 2025; IcePop: arXiv 2510.18855. Log-probs and masks
    are [R_i] of each sample.

    Args:
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
        weights_N, weight_metrics = _weights(tokens, config)
        metrics |= weight_metrics
        if config.rollout_is_batch_normalize:
            if batch is None:
                batch = tokens.moments(weights_N, config)
            total, count = batch.tolist()
            factor = 1.0
            if total > 1e-8 * count:
                factor = total / count
            metrics["rollout_is_batch_norm_factor"] = factor
            weights_N = weights_N / factor
        weights = tokens.scatter(weights_N.astype(np.float32), masks)
    kept_N = np.ones(tokens.log_ratio.size, np.bool_)
    if config.rollout_rs is not None:
        within_N, rejection_metrics = _within_thresholds(tokens, config)
        kept_N &= within_N
        metrics |= rejection_metrics
    if config.rollout_token_veto_threshold is not None:
        is_vetoed_N = tokens.log_ratio < math.log(config.rollout_token_veto_threshold)
        is_vetoed_S = tokens.sums(is_vetoed_N) > 0
        kept_N &= ~tokens.spread(is_vetoed_S)
        metrics["rollout_is_catastrophic_token_fraction"] = is_vetoed_N.mean()
        metrics["rollout_is_veto_fraction"] = is_vetoed_S.mean()
    if config.rollout_rs is not None or config.rollout_token_veto_threshold is not None:
        metrics["rollout_rs_masked_fraction"] = 1 - kept_N.mean()
        metrics["rollout_rs_seq_masked_fraction"] = (tokens.sums(~kept_N) > 0).mean()
    prefixed = {f"rollout_corr/{name}": float(value) for name, value in metrics.items()}
    return weights, tokens.scatter(kept_N, masks), prefixed


async def add_rollout_correction(
    samples: Sequence[Sequence[Sample]],
    config: RolloutCorrectionConfig,
    all_gather: AllGather,
) -> dict[str, float]:
    """Set weights and masks against the mismatch of engine and trainer; return metrics of the whole batch.

    Args:
        samples: of each prompt of this process, with ``old_log_probs``.
    """
    counted = [s for s in chain(*samples) if s.old_log_probs is not None and s.mask.any()]
    columns: dict[str, Any] = {
        "old_log_probs": [s.old_log_probs for s in counted],
        "rollout_log_probs": [s.rollout_log_probs for s in counted],
        "masks": [s.mask for s in counted],
    }
    batch = None
    if config.rollout_is_batch_normalize:
        moments = weight_moments(**columns, config=config) if counted else np.zeros(2)
        batch = sum(await all_gather(moments), np.zeros(2))
    weights = None
    masks: Sequence[Any] = ()
    metrics: dict[str, float] = {}
    if counted:
        weights, masks, metrics = rollout_correction(**columns, config=config, batch=batch)
    for sample in chain(*samples):
        sample.rollout_is_weights = (
            np.zeros(sample.mask.shape, np.float32) if config.rollout_is else None
        )
    for sample, sample_weights in zip(counted, weights or (), strict=weights is not None):
        sample.rollout_is_weights = sample_weights
    for sample, mask in zip(counted, masks, strict=True):
        sample.response_mask = mask
    return _combine_metrics(await all_gather((len(counted), metrics)))


def _combine_metrics(parts: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Combine the metrics of parts of a batch, given each one's number of samples."""
    counts: dict[str, list[int]] = {}
    values: dict[str, list[float]] = {}
    for count, metrics in parts:
        for name, value in metrics.items():
            counts.setdefault(name, []).append(count)
            values.setdefault(name, []).append(value)
    combined: dict[str, float] = {}
    for name in sorted(values):
        if name.endswith("_max"):
            combined[name] = max(values[name])
        elif name.endswith("_min"):
            combined[name] = min(values[name])
        else:
            combined[name] = float(np.average(values[name], weights=counts[name]))
    return combined


def weight_moments(
    old_log_probs: Sequence[_Floats],
    rollout_log_probs: Sequence[_Floats],
    masks: Sequence[NDArray[np.bool_]],
    config: RolloutCorrectionConfig,
) -> _Array:
    """Return sum and count of the weights, shape [2]; parts of a batch add up.

    With sequence weights a sequence counts once.

    Errors are those of `rollout_correction`, and a `ConfigError` without ``rollout_is``.
    """
    if config.rollout_is is None:
        raise ConfigError("rollout_is is None; expected token or sequence for weights")
    tokens = _Tokens.of(old_log_probs, rollout_log_probs, masks)
    return tokens.moments(_weights(tokens, config)[0], config)


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
        cls,
        old_log_probs: Sequence[_Floats],
        rollout_log_probs: Sequence[_Floats],
        masks: Sequence[NDArray[np.bool_]],
    ) -> "_Tokens":
        shapes = [
            [array.shape for array in arrays]
            for arrays in (old_log_probs, rollout_log_probs, masks)
        ]
        if shapes[0] != shapes[2] or shapes[1] != shapes[2]:
            raise BatchError(
                f"old_log_probs, rollout_log_probs and masks have shapes {shapes}; expected equal shapes"
            )
        counts = np.array([mask.sum() for mask in masks], np.int64)
        if not counts.any():
            raise BatchError(
                f"masks of {len(masks)} samples have no token that counts; expected at least one"
            )
        old = _join("old_log_probs", old_log_probs, masks)
        rollout = _join("rollout_log_probs", rollout_log_probs, masks)
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

    def moments(self, weights_N: _Array, config: RolloutCorrectionConfig) -> _Array:
        weights = self.means(weights_N) if config.rollout_is == "sequence" else weights_N
        return np.array([weights.sum(), weights.size], np.float64)

    def spread(self, values_S: NDArray[_Scalar]) -> NDArray[_Scalar]:
        """Repeat each sequence's value at its tokens: [N]."""
        return np.repeat(values_S, self.counts)

    def scatter(
        self, values_N: NDArray[_Scalar], masks: Sequence[NDArray[np.bool_]]
    ) -> list[NDArray[_Scalar]]:
        """Distribute to samples: [R_i] of each, 0 outside its mask."""
        results = [np.zeros(mask.shape, values_N.dtype) for mask in masks]
        ends = np.cumsum([mask.sum() for mask in masks])
        for result, mask, part in zip(results, masks, np.split(values_N, ends[:-1]), strict=True):
            result[mask] = part
        return results


def _join(field: str, arrays: Sequence[_Floats], masks: Sequence[NDArray[np.bool_]]) -> _Array:
    """Return the numbers of the tokens that count, end to end; `BatchError` if one is not finite."""
    parts: list[_Floats] = []
    for i, (array, mask) in enumerate(zip(arrays, masks, strict=True)):
        require_finite(f"{field}[{i}]", array, mask)
        parts.append(array[mask])
    return np.concatenate(parts).astype(np.float64)


def _ratios(log_ratio: _Array) -> _Array:
    return np.exp(log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def _weights(tokens: _Tokens, config: RolloutCorrectionConfig) -> tuple[_Array, dict[str, Any]]:
    """Return the weights [N] before any normalisation, and their metrics."""
    upper = config.rollout_is_threshold
    lower = config.rollout_is_threshold_lower
    is_sequence = config.rollout_is == "sequence"
    log_ratio_N = tokens.log_ratio
    if is_sequence:
        log_ratio_N = tokens.spread(tokens.sums(log_ratio_N))
    raw_N = _ratios(log_ratio_N)
    weights_N = np.minimum(raw_N, upper)
    if lower is not None:
        weights_N = np.where((raw_N >= lower) & (raw_N <= upper), raw_N, 0.0)
    raw = raw_N
    extremes = weights_N
    if is_sequence:
        # All tokens of a sequence share its weight.
        raw = raw_N[tokens.starts]
        extremes = raw
    lowest = 1 / upper if lower is None else lower
    mean = weights_N.mean()
    weights_S = tokens.means(weights_N)
    metrics = {
        "rollout_is_mean": mean,
        "rollout_is_max": extremes.max(),
        "rollout_is_min": extremes.min(),
        "rollout_is_std": weights_N.std(),
        "rollout_is_eff_sample_size": mean**2 / max(np.square(weights_N).mean(), 1e-16),
        "rollout_is_ratio_fraction_high": (raw > upper).mean(),
        "rollout_is_ratio_fraction_low": (raw < lowest).mean(),
        "rollout_is_seq_mean": weights_S.mean(),
        "rollout_is_seq_max": weights_S.max(),
        "rollout_is_seq_min": weights_S.min(),
    }
    if lower is not None:
        metrics["rollout_is_oob_ratio"] = (weights_N == 0).mean()
    return weights_N, metrics


def _within_thresholds(
    tokens: _Tokens, config: RolloutCorrectionConfig
) -> tuple[NDArray[np.bool_], dict[str, Any]]:
    """Return the tokens [N] that ``rollout_rs`` keeps, and metrics of its statistic."""
    log_ratio_N = tokens.log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    level, _, estimator = str(config.rollout_rs).rpartition("_")
    match estimator:
        case "k1":
            statistic = -log_ratio_N
        case "k2":
            statistic = np.square(log_ratio_N) / 2
        case "k3":
            statistic = np.expm1(log_ratio_N) - log_ratio_N
        case "kl":
            statistic = _divergence(tokens)
        case _:
            statistic = np.abs(np.exp(tokens.old) - np.exp(tokens.rollout))
    reduction = {"seq_sum": tokens.sums, "seq_mean": tokens.means, "seq_max": tokens.maxima}
    if level != "token":
        statistic = reduction[level](statistic)
    upper = config.rollout_rs_threshold
    lower = config.rollout_rs_threshold_lower
    assert upper is not None
    if estimator == "k1":
        if lower is None:
            lower = 1 / upper
        within = (statistic >= math.log(lower)) & (statistic <= math.log(upper))
    else:
        within = statistic <= upper
    statistic_N = statistic
    within_N = within
    if level != "token":
        statistic_N = tokens.spread(statistic)
        within_N = tokens.spread(within)
    name = f"rollout_rs_{config.rollout_rs}"
    metrics = {
        f"{name}_mean": statistic_N.mean(),
        f"{name}_max": statistic.max(),
        f"{name}_min": statistic.min(),
    }
    return within_N.astype(np.bool_), metrics


def _divergence(tokens: _Tokens) -> _Array:
    """Return KL(rollout || old) [N] between a token and all others (DPPO, arXiv 2602.04879)."""
    rollout_N = np.exp(tokens.rollout)
    others_N = np.log1p(_EPSILON - rollout_N) - np.log1p(_EPSILON - np.exp(tokens.old))
    return (1 - rollout_N) * others_N - rollout_N * tokens.log_ratio


def _divergence_metrics(tokens: _Tokens) -> dict[str, Any]:
    """Measure the mismatch of the policies: KL(rollout || old), perplexities, and chi-squared of the ratios."""
    old_S = -tokens.means(tokens.old)
    rollout_S = -tokens.means(tokens.rollout)
    difference_S = old_S - rollout_S
    ratio_N = _ratios(tokens.log_ratio)
    return {
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
