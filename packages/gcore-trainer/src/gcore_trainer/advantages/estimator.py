"""Advantages of a batch from its rewards: the interface of an estimator, whitening and KL controllers."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gcore_trainer.config import KLControlConfig, Registry
from gcore_trainer.errors import BatchError, StateError
from gcore_trainer.sample import LARGEST, Sample, require_finite

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +- this much, so that no ratio overflows."""
_MIN_REST = 1e-6
ESTIMATORS = Registry("gcore_trainer.advantages.estimators", "adv_estimator")


ScoredTurn = tuple[int, int, float, int]
"""A turn of an agent: where its tokens start and stop, its return, and a number that is equal for equal states; or a
step of a response, whose reward takes the place of the return."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoredGroup:
    """The n responses to one prompt; R_i is the number of tokens of response i.

    Example:
        >>> masks = [np.ones(2, bool), np.ones(3, bool)]
        >>> group = ScoredGroup(rewards=[np.array([0.0, 1.0]), np.zeros(3)], masks=masks)
        >>> group.scores.tolist()
        [1.0, 0.0]
    """

    rewards: Sequence[NDArray[np.floating]]
    """[R_i] of each response: its score at the last token that counts, and any KL penalty at every token."""
    masks: Sequence[NDArray[np.bool_]]
    """[R_i] of each response: tokens that the policy wrote."""
    values: Sequence[NDArray[np.floating]] | None = None
    """[R_i] of each response: the critic's values, for an estimator that needs a critic."""
    squared_norms: Sequence[NDArray[np.floating]] | None = None
    """[R_i] of each response: see `Sample.squared_norms`, for an estimator that needs them."""
    greedy_score: float | None = None
    """Score of the greedy response to the prompt, for an estimator that needs one."""
    parts: Sequence[Mapping[str, float]] = ()
    """Parts of each response's reward, by name."""
    turns: Sequence[Sequence[ScoredTurn]] = ()
    """The turns or steps of each response, for an estimator that reads them."""

    @property
    def scores(self) -> NDArray[np.float64]:
        """[n] sum of each response's rewards."""
        return np.array([rewards.sum() for rewards in self.rewards])

    def part(self, name: str) -> NDArray[np.float64]:
        """Return a part of each response's reward, [n]; raise `BatchError` if a response does not have it."""
        values: list[float] = []
        for parts in self.parts:
            if name not in parts:
                raise BatchError(f"parts is {dict(parts)}; expected a part {name!r} of the reward")
            values.append(parts[name])
        return np.array(values)

    def at_every_token(self, advantages: ArrayLike) -> list[NDArray[np.floating]]:
        """Give all tokens of response i the advantage i."""
        return [
            np.full(mask.shape, a)
            for mask, a in zip(self.masks, np.asarray(advantages), strict=True)
        ]


_Arrays = Sequence[NDArray[np.floating]]
_Function = Callable[..., _Arrays | tuple[_Arrays, _Arrays]]


@dataclass(frozen=True, kw_only=True)
class AdvantageEstimator:
    """A function from the scored responses to one prompt to advantages, with its needs.

    Example:
        >>> @advantage_estimator(min_group_size=2)
        ... def centred(group: ScoredGroup):
        ...     return group.at_every_token(group.scores - group.scores.mean())
        >>> masks = [np.ones(2, bool), np.ones(3, bool)]
        >>> group = ScoredGroup(rewards=[np.array([0.0, 1.0]), np.zeros(3)], masks=masks)
        >>> advantages, returns = centred(group)
        >>> [values.tolist() for values in advantages]
        [[0.5, 0.5], [-0.5, -0.5, -0.5]]
    """

    function: _Function
    """Takes a `ScoredGroup` and, as keyword-only parameters, its options (see `options_type`).

    Returns the advantages [R_i] of each response; with ``needs_critic`` a tuple of these and the returns [R_i] of
    each response, which are the critic's targets."""
    needs_critic: bool = False
    needs_greedy: bool = False
    """The greedy response to every prompt is generated and scored, too."""
    needs_squared_norms: bool = False
    """`Sample.squared_norms` are computed, by one more pass of the policy."""
    reads_token_rewards: bool = False
    """Rewards are read token by token, so that they may hold a KL penalty; otherwise only their sum is."""
    reads_turns: bool = False
    """Returns of turns are read, which otherwise take the place of advantages."""
    reads_steps: bool = False
    """As ``reads_turns``, but of steps of a response, or of turns whose returns are their own rewards alone."""
    moves_baselines: bool = False
    """Baselines of roles, which the run keeps from batch to batch, are subtracted from the returns of turns."""
    whiten: bool = False
    """The advantages are whitened over the batch."""
    centers_batch: bool = False
    """The mean score of the batch's responses is subtracted from the advantages."""
    min_group_size: int = 1
    """Fewest responses to a prompt that can be compared."""

    def __call__(self, group: ScoredGroup, **options: Any) -> tuple[_Arrays, _Arrays | None]:
        """Return advantages and any returns; raise `BatchError` if the group or the function does not fit the needs."""
        for field, is_needed in (
            ("values", self.needs_critic),
            ("greedy_score", self.needs_greedy),
            ("squared_norms", self.needs_squared_norms),
        ):
            if is_needed and getattr(group, field) is None:
                raise BatchError(
                    f"{field} is None; expected a value, which the advantage estimator needs"
                )
        advantages: Any = self.function(group, **options)
        returns: Any = None
        # The advantages of two responses may be a tuple, too, but of arrays.
        has_returns = (
            isinstance(advantages, tuple)
            and len(advantages) == 2
            and isinstance(advantages[0], Sequence)
        )
        if has_returns:
            advantages, returns = advantages
        if has_returns != self.needs_critic:
            raise BatchError(
                f"returns is {returns}; expected {'returns' if self.needs_critic else 'None'} for an advantage "
                f"estimator with needs_critic={self.needs_critic}"
            )
        expected = [mask.shape for mask in group.masks]
        for field, arrays in (("advantages", advantages), ("returns", returns)):
            if arrays is None:
                continue
            shapes = [np.shape(array) for array in arrays]
            if shapes != expected:
                raise BatchError(
                    f"{field} has shapes {shapes}; expected those of the responses, {expected}"
                )
        return advantages, returns


def advantage_estimator(**needs: Any) -> Callable[[_Function], AdvantageEstimator]:
    """Make an `AdvantageEstimator` of the decorated function; ``needs`` are its other fields."""
    return lambda function: AdvantageEstimator(function=function, **needs)


@cache
def get_advantage_estimator(name: str) -> AdvantageEstimator:
    """Return an estimator by its name, or a user's own by ``PATH.py:function``; a plain function needs nothing.

    Raises:
        ConfigError: there is no such estimator, no such file, or the file does not import.
    """
    estimator = ESTIMATORS.load(name)
    if not isinstance(estimator, AdvantageEstimator):
        estimator = AdvantageEstimator(function=estimator)
    return estimator


def checked_scores(scores: ArrayLike) -> NDArray[np.float64]:
    """Return the scores [n] of a group in float64; raise `BatchError` if there are none, or one is not finite."""
    r = np.asarray(scores, dtype=np.float64)
    if r.ndim != 1 or r.size == 0 or not np.isfinite(r).all():
        raise BatchError(
            f"scores is {r}; expected one dimension, at least one entry and finite numbers"
        )
    return r


def whitening_moments(
    values: Sequence[NDArray[np.floating]], masks: Sequence[NDArray[np.bool_]]
) -> NDArray[np.float64]:
    """Return count, sum and sum of squares of the tokens in the masks, shape [3]; parts of a batch add up.

    Raises:
        BatchError: the value of a token in a mask is not finite.
    """
    count = 0
    total = 0.0
    squares = 0.0
    for i, (v, m) in enumerate(zip(values, masks, strict=True)):
        require_finite(f"values[{i}]", v, m)
        counted = v[m].astype(np.float64)
        count += counted.size
        total += counted.sum()
        squares += np.square(counted).sum()
    return np.array([count, total, squares], np.float64)


def whiten(
    values: NDArray[np.floating], mask: NDArray[np.bool_], batch: NDArray[np.float64]
) -> NDArray[np.float32]:
    """Shift and scale the values of one response to the batch's mean 0 and standard deviation 1; 0 outside the mask.

    (v - mean) / sqrt(var + 1e-8), var with n - 1 in the denominator. A batch of one token is only centred.

    Args:
        values: [R] of one response.
        mask: [R] tokens that count.
        batch: `whitening_moments` of the whole batch.
    """
    count, total, squares = batch.tolist()
    mean = total / max(count, 1.0)
    variance = 1.0
    if count > 1:
        variance = max(squares - count * mean * mean, 0.0) / (count - 1.0)
    return np.where(mask, (values - mean) / np.sqrt(variance + 1e-8), 0.0).astype(np.float32)


class KLController:
    """The weight of the KL penalty in the reward, which is constant or follows the divergence, as ``config.type`` says.

    An adaptive one is a controller in log space (arXiv 1909.08593, sec. 2.2): e = clip(KL / target_kl - 1, -0.2, 0.2);
    value <- value (1 + e n_steps / horizon), from ``kl_coef`` on.

    Example:
        >>> controller = KLController(KLControlConfig(kl_coef=0.1, type="adaptive", target_kl=6.0, horizon=10_000))
        >>> controller.update(current_kl=12.0, n_steps=1_000)
        >>> round(controller.value, 4)
        0.102
    """

    def __init__(self, config: KLControlConfig) -> None:
        self._config = config
        self.value = float(config.kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Follow one batch; a constant weight stays as it is.

        Args:
            current_kl: mean divergence of the batch, in the unit of ``target_kl``.
            n_steps: responses in the batch, or what else the horizon counts.

        Raises:
            BatchError: the divergence is not finite, or n_steps so large that the value could leave the positive side.
        """
        if self._config.type == "fixed":
            return
        horizon = self._config.horizon
        if not math.isfinite(current_kl):
            raise BatchError(f"current_kl is {current_kl}; expected a finite number")
        if not 0 <= n_steps < 5 * horizon:
            raise BatchError(
                f"n_steps is {n_steps}; expected 0 or more, and less than five times horizon={horizon}"
            )
        error = min(max(current_kl / self._config.target_kl - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / horizon

    def state(self) -> dict[str, float]:
        """Return the state for `load_state`."""
        return {"value": self.value}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Take over a saved weight; raise `StateError` for a state that is not one of `state`."""
        if set(state) != {"value"} or not 0 <= state["value"] < math.inf:
            raise StateError(
                f"state is {dict(state)}; expected one entry 'value', a finite number, 0 or more"
            )
        self.value = float(state["value"])


AllGather = Callable[[Any], Awaitable[list[Any]]]
"""Exchange between the processes that hold parts of a batch: gives each one every process's value, by rank.

All processes make the same calls.
"""


def check_finite_tokens(
    batches: Sequence[Sequence[Sample]],
    *fields: str,
    named: Callable[[int, int], str] = "micro_batches[{}][{}]".format,
) -> None:
    """Check `Sample.check_finite` of every sample, one by one only if any number is not finite.

    Args:
        named: called with the indices of a batch and of a sample in it; returns the sample's name in an error.

    Raises:
        BatchError: a number of a token that counts is not finite.
    """
    suspects: list[str] = []
    for field in fields:
        arrays: list[NDArray[np.float32]] = []
        for sample in chain.from_iterable(batches):
            values = getattr(sample, field)
            if values is not None:
                arrays.append(values)
        if arrays and not (np.abs(np.concatenate(arrays)) <= LARGEST).all():
            suspects.append(field)
    if not suspects:
        return
    for i, batch in enumerate(batches):
        for j, sample in enumerate(batch):
            sample.check_finite(named(i, j), *suspects)


async def add_advantages(
    samples: Sequence[Sequence[Sample]],
    rewards: Sequence[Sequence[NDArray[np.float64]]],
    greedy_scores: Sequence[float | None],
    estimator: AdvantageEstimator,
    options: Mapping[str, Any],
    all_gather: AllGather,
    *,
    credits: Sequence[Sequence[NDArray[np.float32] | None]] = (),
    parts: Sequence[Sequence[Mapping[str, float]]] = (),
    turns: Sequence[Sequence[Sequence[ScoredTurn]]] = (),
) -> dict[str, float]:
    """Set the advantages of samples, and returns if the estimator needs a critic; they are whitened if it says so.

    Args:
        samples: of each group of this process; a critic's values are in them.
        rewards: [R] of each sample: see `ScoredGroup`.
        options: of the estimator, by name.
        credits: [R] advantages of each sample that has them already; None: the estimator makes them. Empty: of all.
        parts: of each sample's reward, by name. Empty: they have none.
        turns: of each sample, for an estimator that reads them. Empty: they have none.

    Returns:
        metrics of the whole batch under verl's names.

    Raises:
        BatchError: a group lacks something that the estimator needs, or a number that counts is not finite.
    """
    everyone: list[Any] = []
    scores: list[NDArray[np.float64]] = []
    nothing = [()] * len(samples)
    groups = zip(samples, rewards, greedy_scores, parts or nothing, turns or nothing, strict=True)
    for group_samples, group_rewards, greedy_score, group_parts, group_turns in groups:
        values = [s.values for s in group_samples if s.values is not None] or None
        norms = [s.squared_norms for s in group_samples if s.squared_norms is not None] or None
        masks = [s.mask for s in group_samples]
        scored = ScoredGroup(
            rewards=group_rewards,
            masks=masks,
            values=values,
            squared_norms=norms,
            greedy_score=greedy_score,
            parts=group_parts,
            turns=group_turns,
        )
        advantages, returns = estimator(scored, **options)
        for sample, sample_advantages in zip(group_samples, advantages, strict=True):
            sample.advantages = sample_advantages.astype(np.float32)
        for sample, sample_returns in zip(group_samples, returns or (), strict=returns is not None):
            sample.returns = sample_returns.astype(np.float32)
        everyone.extend(group_samples)
        scores.append(scored.scores)
    metrics = await statistics("critic/rewards", scores, all_gather)
    if estimator.centers_batch:
        for sample in everyone:
            sample.advantages -= np.float32(metrics["critic/rewards/mean"])
    if estimator.whiten:
        moments = whitening_moments([s.advantages for s in everyone], [s.mask for s in everyone])
        batch = sum(await all_gather(moments), np.zeros(3))
        for sample in everyone:
            sample.advantages = whiten(sample.advantages, sample.mask, batch)
    for group_samples, group_credits in zip(samples, credits, strict=bool(credits)):
        for sample, credit in zip(group_samples, group_credits, strict=True):
            if credit is not None:
                sample.advantages = np.where(sample.mask, credit, np.float32(0))
    fields = ["advantages"]
    if estimator.needs_critic:
        fields = ["values", "returns", "advantages"]
    for field in fields:
        counted = [getattr(s, field)[s.mask] for s in everyone]
        metrics |= await statistics(f"critic/{field}", counted, all_gather)
    return metrics


async def rollout_mismatch(
    differences: Sequence[NDArray[np.floating]],
    all_gather: AllGather,
    *,
    distributions: Sequence[NDArray[np.floating]] = (),
) -> dict[str, float]:
    """Return metrics of an engine's log-probs against the trainer's, of the tokens of all processes.

    ``training/rollout_log_probs_diff_mean`` and ``_max`` are of absolute differences, in nats;
    ``training/rollout_k3_kl`` is the mean of r - 1 - log r with r = pi_trainer / pi_engine, which estimates
    KL(engine || trainer) in nats per token (J. Schulman, "Approximating KL divergence", 2020);
    ``training/rollout_probs_diff_valid`` is 0 if there are no tokens, and then there are none of these.

    ``training/rollout_distribution_kl`` is the mean KL(engine || trainer) of ``distributions``, in nats per position,
    where tokens that are not given count as one. Unlike the estimate it is not 0 if an engine leaves out the tail.

    Args:
        differences: the trainer's log-probs less the engine's, where they can be compared; NaN counts as 20 nats.
        distributions: log-probs [2, K] of the engine and of the trainer, of K different tokens at one position.
    """
    joined = np.concatenate([np.zeros(0), *differences])
    log_ratio = np.nan_to_num(joined, nan=MAX_LOG_RATIO).clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    size = np.abs(log_ratio)
    part = (
        log_ratio.size,
        size.sum(),
        size.max(initial=0.0),
        (np.expm1(log_ratio) - log_ratio).sum(),
        len(distributions),
        sum(_kl_with_rest(distribution) for distribution in distributions),
    )
    parts = await all_gather(part)
    counts, sums, highest, k3, num_positions, divergences = zip(*parts, strict=True)
    metrics = {"training/rollout_probs_diff_valid": float(sum(counts) > 0)}
    if sum(counts):
        metrics["training/rollout_log_probs_diff_mean"] = float(sum(sums)) / sum(counts)
        metrics["training/rollout_log_probs_diff_max"] = float(max(highest))
        metrics["training/rollout_k3_kl"] = float(sum(k3)) / sum(counts)
    if sum(num_positions):
        mean_kl = float(sum(divergences)) / sum(num_positions)
        metrics["training/rollout_distribution_kl"] = mean_kl
    return metrics


def _kl_with_rest(log_probs: NDArray[np.floating]) -> float:
    """Return KL(p || q) of log-probs [2, K] of p and q, with tokens outside of the K as one; NaN is almost 0."""
    finite = np.nan_to_num(log_probs.astype(np.float64), nan=-MAX_LOG_RATIO)
    probs = np.exp(finite.clip(-MAX_LOG_RATIO))
    # Float32 log-probs of all tokens may add up to a little more than 1.
    rest = (1 - probs.sum(axis=1, keepdims=True)).clip(_MIN_REST)
    p, q = np.concatenate([probs, rest], axis=1)
    return float((p * np.log(p / q)).sum())


async def statistics(
    name: str, values: Sequence[NDArray[Any]], all_gather: AllGather
) -> dict[str, float]:
    """Return mean, maximum and minimum of the numbers of all processes, as metrics; none without any number."""
    joined = np.concatenate([*values, np.zeros(0)])
    part = None
    if joined.size:
        part = (joined.size, float(joined.sum()), float(joined.max()), float(joined.min()))
    parts = list(filter(None, await all_gather(part)))
    if not parts:
        return {}
    count, total, highest, lowest = zip(*parts, strict=True)
    return {
        f"{name}/mean": sum(total) / sum(count),
        f"{name}/max": max(highest),
        f"{name}/min": min(lowest),
    }
