"""How far the engine's log-probabilities are from the trainer's, where both are of the same weights."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gcore_controller import Collectives
from gcore_llm.groups import Group, Response
from gcore_rollout import Completion, Engine, Request, SamplingParams

K3 = "training/rollout_k3_kl"
_SHARE = 0.02
_PROBE_TOKENS = 32
_MAX_LOG_RATIO = 20.0
"""Beyond this a ratio says nothing more; what is not finite counts as this."""

LogProbs = Mapping[tuple[int, int], NDArray[np.float32]]
"""The trainer's, [R] of each response, by the numbers of its group and of its place in the group."""


def comparable(response: Response, version: int, *, keeps_cache: bool) -> NDArray[np.bool_]:
    """[R] which tokens the policy wrote with the weights of a version.

    Args:
        version: the trainer's present one.
        keeps_cache: whether weights may change in the middle of a response, whose later tokens then attend to keys and
            values of older weights, so that the trainer's log-probs are others. Then all of a response counts, or none.
    """
    written = np.ones(response.token_ids.shape, np.bool_) if response.mask is None else response.mask
    is_present = written & (response.weight_versions == version)
    return is_present & (not keeps_cache or bool((is_present == written).all()))


def choose(groups: Sequence[Group], version: int, *, keeps_cache: bool, seed: int) -> list[tuple[int, int]]:
    """Some responses to compare, as (group, place): about 2 % of all tokens, prompts included, and at least one.

    Args:
        groups: a controller's.
        version: see `comparable`, as ``keeps_cache``.
        seed: of the choice.
    """
    sizes = {
        (g, i): group.prompt_ids.size + response.token_ids.size
        for g, group in enumerate(groups)
        for i, response in enumerate(group.responses)
    }
    fit = [k for k in sizes if comparable(groups[k[0]].responses[k[1]], version, keeps_cache=keeps_cache).any()]
    budget = _SHARE * sum(sizes.values())
    chosen: list[tuple[int, int]] = []
    for place in np.random.default_rng(seed).permutation(len(fit)).tolist():
        if chosen and sizes[fit[place]] > budget:
            break
        chosen.append(fit[place])
        budget -= sizes[fit[place]]
    return chosen


def alone(groups: Sequence[Group], chosen: Sequence[tuple[int, int]]) -> list[Group]:
    """Each chosen response as a group of its own."""
    return [replace(groups[g], responses=[groups[g].responses[i]]) for g, i in chosen]


async def mismatch(
    groups: Sequence[Group], log_probs: LogProbs, version: int, *, keeps_cache: bool, group: Collectives
) -> dict[str, float]:
    """Metrics of the tokens of all controllers that can be compared.

    ``training/rollout_log_probs_diff_mean`` and ``_max`` are of absolute differences, in nats;
    ``training/rollout_k3_kl`` is the mean of r - 1 - log r with r = pi_trainer / pi_engine, which estimates
    KL(engine || trainer) in nats per token (J. Schulman, "Approximating KL divergence", 2020);
    ``training/rollout_probs_diff_valid`` is 0 if no token can be compared, and then there are no others.

    Args:
        groups: this controller's.
        log_probs: the trainer's, of some of the responses.
        version: see `comparable`, as ``keeps_cache``.
        group: all controllers.
    """
    differences = [np.zeros(0)]
    for (g, i), ours in log_probs.items():
        response = groups[g].responses[i]
        compared = comparable(response, version, keeps_cache=keeps_cache)
        differences.append(ours[compared].astype(np.float64) - response.log_probs[compared])
    joined = np.concatenate(differences)
    log_ratio = np.where(np.isnan(joined), _MAX_LOG_RATIO, joined).clip(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    size = np.abs(log_ratio)
    own = (log_ratio.size, size.sum(), size.max(initial=0.0), (np.expm1(log_ratio) - log_ratio).sum())
    counts, sums, highest, k3 = zip(*await group.all_gather(own), strict=True)
    if not sum(counts):
        return {"training/rollout_probs_diff_valid": 0.0}
    return {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_log_probs_diff_mean": float(sum(sums)) / sum(counts),
        "training/rollout_log_probs_diff_max": float(max(highest)),
        K3: float(sum(k3)) / sum(counts),
    }


async def probe(policy: Engine, groups: Sequence[Group], sampling: SamplingParams, *, seed: int) -> list[Group]:
    """A short response to one of the prompts by the engine's present weights, as a group; none without a prompt.

    For schedules whose batches are always by older weights than the trainer's.

    Args:
        policy: with nothing else to do, or the response would wait for its turn.
        groups: a controller's.
        sampling: of the run's responses.
        seed: of the choice of the prompt, and of the response.
    """
    texts = [group for group in groups if group.images is None]
    if not texts:
        return []
    group = texts[seed % len(texts)]
    request = Request(
        request_id="probe",
        prompt_token_ids=tuple(group.prompt_ids.tolist()),
        sampling=replace(sampling, max_tokens=min(sampling.max_tokens, _PROBE_TOKENS)),
        seed=seed,
    )
    return [
        replace(group, responses=[_unscored(completion)], greedy_score=None)
        async for completion in policy.generate([request])
    ]


def warning(step: int, metrics: Mapping[str, float], bound: float) -> str | None:
    """A line for the screen if engine and trainer are further apart than ``bound``."""
    k3 = metrics.get(K3, 0.0)
    if math.isfinite(k3) and k3 <= bound:
        return None
    return (
        f"step {step}: engine and trainer disagree on the policy by {k3:.2g} nats per token ({K3}); expected at most "
        f"algorithm.max_rollout_kl = {bound:g}: compare dtype, temperature and attention of both"
    )


def _unscored(completion: Completion) -> Response:
    return Response(
        token_ids=completion.token_ids,
        log_probs=completion.log_probs,
        weight_versions=completion.weight_versions,
        truncated=completion.finish_reason != "stop",
        score=0.0,
    )
