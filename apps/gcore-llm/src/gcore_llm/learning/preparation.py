"""From scored groups to what the policy and the critic learn from: rewards, advantages, returns and corrections."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_controller import Collectives
from gcore_llm.config import AlgorithmConfig, KLControlConfig
from gcore_rollout import Group
from gcore_trainer import (
    AdaptiveKLController,
    AdvantageConfig,
    FixedKLController,
    Sample,
    ScoredGroup,
    kl_estimates,
    kl_rewards,
    overlong_penalty,
    rollout_correction,
    weight_moments,
    whiten,
    whitening_moments,
)

KLController = FixedKLController | AdaptiveKLController
_READ = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "values")
"""Arrays of a sample that advantages and corrections are made of."""


def kl_controller(config: KLControlConfig) -> KLController:
    """Return the controller of the weight of the KL penalty in the reward."""
    if config.type == "fixed":
        return FixedKLController(kl_coef=config.kl_coef)
    return AdaptiveKLController(kl_coef=config.kl_coef, target_kl=config.target_kl, horizon=config.horizon)


async def prepare(
    groups: Sequence[Group],
    samples: Sequence[Sequence[Sample]],
    algorithm: AlgorithmConfig,
    *,
    kl: KLController,
    max_response_length: int,
    group: Collectives,
) -> tuple[list[list[Sample]], dict[str, float]]:
    """Add advantages, and what else the estimator and the correction give; every controller with its share.

    Args:
        groups: this controller's.
        samples: of each group, with the log-probs and values that the algorithm asks for.
        kl: updated with the batch's divergence; the same on all controllers.
        max_response_length: in tokens.
        group: all controllers.

    Returns:
        the samples of each group, and metrics of all controllers' samples, under verl's names.

    Raises:
        BatchError: a log-probability or a value of a token that counts is not finite, or a score.
    """
    for g, own in zip(groups, samples, strict=True):
        for i, sample in enumerate(own):
            sample.check_finite(f"response {i} to prompt {g.prompt_index}", *_READ)
    rewards = [
        [_rewards(g, i, s, algorithm, kl.value, max_response_length) for i, s in enumerate(own)]
        for g, own in zip(groups, samples, strict=True)
    ]
    found = [_with_advantages(g, own, r, algorithm) for g, own, r in zip(groups, samples, rewards, strict=True)]
    metrics = await _statistics("critic/rewards", [np.array([r.sum()]) for own in rewards for r in own], group)
    if algorithm.kl_ctrl.kl_coef:
        metrics |= await _follow_divergence(found, algorithm.kl_ctrl, kl, group)
    if algorithm.estimator.whiten:
        await _whiten_over_batch(found, group)
    if algorithm.estimator.needs_critic:
        for field in ("values", "returns"):
            metrics |= await _statistics(f"critic/{field}", _counted(found, field), group)
    metrics |= await _statistics("critic/advantages", _counted(found, "advantages"), group)
    if algorithm.old_log_probs == "trainer":
        found, corrected = await _corrected(found, algorithm, group)
        metrics |= corrected
    return found, metrics


def _rewards(
    group: Group, index: int, sample: Sample, algorithm: AlgorithmConfig, kl_coef: float, max_response_length: int
) -> NDArray[np.float64]:
    """Rewards of a response's tokens, [R]: its score on the last one that counts, and the KL penalty on all."""
    response = group.responses[index]
    score = response.score
    if algorithm.overlong.buffer_len:
        score += overlong_penalty(
            response.token_ids.size,
            max_response_length=max_response_length,
            overlong_buffer_len=algorithm.overlong.buffer_len,
            penalty_factor=algorithm.overlong.penalty_factor,
        )
    if kl_coef and sample.mask.any():
        kind = algorithm.kl_ctrl.kl_penalty
        return kl_rewards(score, *_policy_and_reference(sample), sample.mask, coef=kl_coef, kind=kind)
    rewards = np.zeros(sample.mask.shape, np.float64)
    # A response may end in tokens that the policy did not write; rewards there are not read.
    rewards[np.flatnonzero(sample.mask)[-1] if sample.mask.any() else -1] = score
    return rewards


def _with_advantages(
    group: Group, samples: Sequence[Sample], rewards: list[NDArray[np.float64]], algorithm: AlgorithmConfig
) -> list[Sample]:
    scored = ScoredGroup(
        rewards=rewards,
        masks=[s.mask for s in samples],
        values=[s.values for s in samples if s.values is not None] or None,
        greedy_score=group.greedy_score,
    )
    settings = AdvantageConfig(
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo, gamma=algorithm.gamma, lam=algorithm.lam
    )
    advantages, returns = algorithm.estimator(scored, settings)
    found = [_replaced(s, advantages=a) for s, a in zip(samples, advantages, strict=True)]
    return found if returns is None else [_replaced(s, returns=r) for s, r in zip(found, returns, strict=True)]


def _policy_and_reference(sample: Sample) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Log-probs [R] under the policy before its update, and under the initial one."""
    log_probs = sample.rollout_log_probs if sample.old_log_probs is None else sample.old_log_probs
    assert log_probs is not None
    assert sample.ref_log_probs is not None
    return log_probs, sample.ref_log_probs


async def _follow_divergence(
    samples: Sequence[Sequence[Sample]], config: KLControlConfig, kl: KLController, group: Collectives
) -> dict[str, float]:
    own = [
        float(kl_estimates(*_policy_and_reference(s), s.mask, config.kl_penalty)[s.mask].mean())
        for part in samples
        for s in part
        if s.mask.any()
    ]
    everyones = [value for part in await group.all_gather(own) for value in part]
    mean = float(np.mean(everyones)) if everyones else 0.0
    metrics = {"actor/reward_kl_penalty": mean, "actor/reward_kl_penalty_coeff": kl.value}
    kl.update(mean, len(everyones))
    return metrics


async def _whiten_over_batch(samples: list[list[Sample]], group: Collectives) -> None:
    """Whiten the advantages over all controllers' samples, in place in the lists."""
    own = [(s.advantages, s.mask) for part in samples for s in part if s.advantages is not None]
    batch = sum(await group.all_gather(whitening_moments([a for a, _ in own], [m for _, m in own])), np.zeros(3))
    for part in samples:
        for i, sample in enumerate(part):
            assert sample.advantages is not None
            part[i] = _replaced(sample, advantages=whiten(sample.advantages, sample.mask, batch))


async def _corrected(
    samples: list[list[Sample]], algorithm: AlgorithmConfig, group: Collectives
) -> tuple[list[list[Sample]], dict[str, float]]:
    """Weights and masks against the mismatch of engine and trainer, where there are the trainer's log-probs."""
    config = algorithm.rollout_correction
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
            return dataclasses.replace(sample, rollout_is_weights=nothing)
        return dataclasses.replace(
            sample, response_mask=masks[i], rollout_is_weights=None if weights is None else weights[i]
        )

    everyones = await group.all_gather((len(counted), metrics))
    return [[corrected(s) for s in part] for part in samples], _combined(everyones)


def _combined(parts: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Metrics of all controllers' samples, from each one's number of samples and metrics."""
    combined: dict[str, float] = {}
    for name in sorted({name for _, metrics in parts for name in metrics}):
        found = [(count, metrics[name]) for count, metrics in parts if name in metrics]
        values = [value for _, value in found]
        if name.endswith("_max"):
            combined[name] = max(values)
        elif name.endswith("_min"):
            combined[name] = min(values)
        else:
            combined[name] = float(np.average(values, weights=[count for count, _ in found]))
    return combined


def _counted(samples: Sequence[Sequence[Sample]], field: str) -> list[NDArray[Any]]:
    return [getattr(s, field)[s.mask] for part in samples for s in part]


async def _statistics(name: str, values: Sequence[NDArray[Any]], group: Collectives) -> dict[str, float]:
    own = np.concatenate([*values, np.zeros(0)])
    part = (own.size, float(own.sum()), float(own.max()), float(own.min())) if own.size else None
    parts = [p for p in await group.all_gather(part) if p is not None]
    if not parts:
        return {}
    count, total, highest, lowest = zip(*parts, strict=True)
    return {f"{name}/mean": sum(total) / sum(count), f"{name}/max": max(highest), f"{name}/min": min(lowest)}


def _replaced(sample: Sample, **arrays: NDArray[Any]) -> Sample:
    return dataclasses.replace(sample, **{name: array.astype(np.float32) for name, array in arrays.items()})
