"""An engine against the trainer with the same weights: log-probs of sampled tokens, and distributions at positions."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gcore_controller import Collectives
from gcore_rollout import Completion, Engine, Group, Request, SamplingParams
from gcore_trainer import rollout_mismatch

ScoredResponse = tuple[Completion, NDArray[np.float32]]
"""A response with the trainer's log-probs [R] of its tokens."""
K3 = "training/rollout_k3_kl"
DISTRIBUTION_KL = "training/rollout_distribution_kl"
_SHARE = 0.02
_MOST_PROBES = 4
_NUM_DRAWS = 16
_PROBE_FREQ = 10


def comparable(response: Completion, version: int, *, keeps_cache: bool) -> NDArray[np.bool_]:
    """Return, [R], which tokens the policy generated with the weights of a version.

    If the engine ``keeps_cache``, weights may change in the middle of a response, whose later tokens then attend to
    keys and values of older weights, so that the trainer's log-probs differ. Then all of a response counts, or none.
    """
    is_present = response.weight_versions == version
    if response.mask is not None:
        is_present &= response.mask
    if keeps_cache and is_present.sum() < response.sampled_versions.size:
        return np.zeros(is_present.shape, np.bool_)
    return is_present


def choose(
    groups: Sequence[Group], is_candidate: Callable[[Group, Completion], bool], *, seed: int
) -> list[Group]:
    """Choose responses to compare, each as a group: about 2 % of all tokens, prompts included, and at least one."""
    candidates: list[Group] = []
    sizes: list[int] = []
    num_tokens = 0
    for group in groups:
        for response in group.responses:
            size = group.prompt_ids.size + response.token_ids.size
            num_tokens += size
            if is_candidate(group, response):
                candidates.append(replace(group, responses=[response]))
                sizes.append(size)
    budget = _SHARE * num_tokens
    chosen: list[Group] = []
    for k in np.random.default_rng(seed).permutation(len(candidates)):
        if chosen and sizes[k] > budget:
            break
        chosen.append(candidates[k])
        budget -= sizes[k]
    return chosen


async def mismatch(
    scored: Iterable[ScoredResponse],
    version: int,
    *,
    keeps_cache: bool,
    probed: Sequence[Sequence[ScoredResponse]],
    group: Collectives,
) -> dict[str, float]:
    """Return `gcore_trainer.rollout_mismatch` of all controllers' `comparable` tokens.

    Args:
        probed: the responses of each group of `probe`: distributions are compared at their first tokens.
    """
    differences: list[NDArray[np.floating]] = []
    for response, ours in scored:
        compared = comparable(response, version, keeps_cache=keeps_cache)
        differences.append(ours[compared].astype(np.float64) - response.log_probs[compared])
    distributions: list[NDArray[np.floating]] = []
    for position in probed:
        by_token: dict[int, tuple[np.float32, np.float32]] = {}
        for response, ours in position:
            if response.weight_versions[0] == version:
                by_token[int(response.token_ids[0])] = response.log_probs[0], ours[0]
        if by_token:
            distributions.append(np.array(list(by_token.values())).T)
    return await rollout_mismatch(differences, group.all_gather, distributions=distributions)


def is_probed(step: int) -> bool:
    """Return whether a step calls `probe`: the first two do, and then every tenth."""
    return step <= 2 or step % _PROBE_FREQ == 0


async def probe(
    policy: Engine,
    groups: Sequence[Group],
    sampling: SamplingParams,
    *,
    seed: int,
    num_tokens: int = 1,
) -> list[Group]:
    """Sample again at positions of some responses, by the idle engine's present weights; return a group for each.

    The first tokens of its samples show the engine's distribution there. Positions in text of one conversation are
    taken; the samples are as long as the rest of the response at most.
    """

    def is_text(group: Group, response: Completion) -> bool:
        is_linear = not group.has_images and response.forks is None
        return is_linear and response.sampled_versions.size > 0

    generator = np.random.default_rng(seed)
    positions: list[Group] = []
    requests: list[Request] = []
    for group in choose(groups, is_text, seed=seed)[:_MOST_PROBES]:
        (response,) = group.responses
        start = int(generator.choice(np.flatnonzero(response.weight_versions >= 0)))
        prompt_ids = np.concatenate([group.prompt_ids, response.token_ids[:start]])
        max_tokens = min(num_tokens, response.token_ids.size - start)
        request = Request(
            request_id=str(len(requests)),
            prompt_token_ids=tuple(prompt_ids.tolist()),
            sampling=replace(sampling, max_tokens=max_tokens),
            n=_NUM_DRAWS,
            seed=seed,
        )
        requests.append(request)
        positions.append(replace(group, prompt_ids=prompt_ids, responses=[], greedy_score=None))
    async for completion in policy.generate(requests):
        positions[int(completion.request_id)].responses.append(completion)
    return positions


def warning(step: int, metrics: Mapping[str, float], bound: float) -> str | None:
    """Return a line for the screen if engine and trainer differ by more than ``bound``."""
    for name, unit in ((K3, "token"), (DISTRIBUTION_KL, "position")):
        kl = metrics.get(name, 0.0)
        if not (math.isfinite(kl) and kl <= bound):
            return (
                f"step {step}: engine and trainer disagree on the policy by {kl:.2g} nats per {unit} ({name}); "
                f"expected at most algorithm.max_rollout_kl = {bound:g}: "
                "compare dtype, temperature and attention of both"
            )
    return None
