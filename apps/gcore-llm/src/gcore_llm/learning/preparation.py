"""From scored groups to what the policy and the critic learn from, in micro-batches; and the metrics of that work."""

import heapq
import math
import re
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_controller import Collectives
from gcore_llm.config import AlgorithmConfig
from gcore_llm.learning.pieces import list_pieces
from gcore_placement import Device, PlacementError, TransformerWorkload, micro_batches
from gcore_rollout import Completion, Engine, Group, PromptImages, Request, SamplingParams
from gcore_trainer import (
    AdvantageConfig,
    Images,
    KLController,
    Sample,
    add_advantages,
    add_rollout_correction,
    check_finite_tokens,
    follow_divergence,
    get_advantage_estimator,
    kl_rewards,
    overlong_penalty,
    rollout_mismatch,
)

ScoredResponse = tuple[Completion, NDArray[np.float32]]
"""A response with the trainer's log-probs [R] of its tokens."""
K3 = "training/rollout_k3_kl"
DISTRIBUTION_KL = "training/rollout_distribution_kl"
_READ = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "values")
"""Arrays of a sample that advantages and corrections are made of."""
_SHARE = 0.02
_MOST_PROBES = 4
_NUM_DRAWS = 16
_REPEATED = re.compile(r"(<[^<>\s]+>)\1{3,}")


def unscored_samples(group: Group, algorithm: AlgorithmConfig) -> list[Sample]:
    """Return the samples to train on, without advantages yet; no token of a filtered response counts."""
    prompt_images = _read_images(group.images)
    samples: list[Sample] = []
    for response in group.responses:
        mask = response.mask
        if response.is_truncated and algorithm.overlong.filter:
            mask = np.zeros(response.token_ids.shape, np.bool_)
        sample = Sample(
            prompt_ids=group.prompt_ids,
            response_ids=response.token_ids,
            response_mask=mask,
            old_log_probs=response.log_probs if algorithm.old_log_probs == "rollout" else None,
            rollout_log_probs=response.log_probs,
            images=_read_images(response.images) or prompt_images,
            forks=response.forks,
        )
        if response.routed_experts is not None:
            sample.routed_experts = response.routed_experts[sample.input_index]
        samples.append(sample)
    return samples


def _read_images(images: PromptImages | None) -> Images | None:
    """Return the pixels of encoded images, and where they start."""
    if images is None:
        return None
    pixels = images.pixels()
    starts = None
    if images.starts is not None:
        starts = np.array(images.starts, np.int64)
    return Images(pixel_values=pixels.pixel_values, grid_thw=pixels.grid_thw, starts=starts)


async def prepare(
    groups: Sequence[Group],
    samples: Sequence[Sequence[Sample]],
    algorithm: AlgorithmConfig,
    *,
    kl: KLController,
    max_response_length: int,
    group: Collectives,
) -> dict[str, float]:
    """Set advantages, and what else the estimator and the correction give, of the samples of this controller's groups.

    Args:
        samples: of each group, with the log-probs and values that the algorithm asks for.
        kl: updated with the batch's divergence; the same on all controllers.

    Returns:
        metrics of all controllers' samples, under verl's names.

    Raises:
        BatchError: a log-probability or a value of a token that counts is not finite, or a score.
    """
    check_finite_tokens(
        samples, *_READ, named=lambda g, i: f"response {i} to prompt {groups[g].prompt_index}"
    )
    rewards: list[list[NDArray[np.float64]]] = []
    for scored, group_samples in zip(groups, samples, strict=True):
        pairs = zip(scored.responses, group_samples, strict=True)
        rewards.append([_rewards(r, s, algorithm, kl.value, max_response_length) for r, s in pairs])
    divergence: dict[str, float] = {}
    if algorithm.kl_ctrl.kl_coef:
        all_samples = list(chain.from_iterable(samples))
        divergence = await follow_divergence(
            all_samples, algorithm.kl_ctrl.kl_penalty, kl, group.all_gather
        )
    settings = AdvantageConfig(
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
    )
    estimator = get_advantage_estimator(algorithm.adv_estimator)
    greedy_scores = [g.greedy_score for g in groups]
    metrics = await add_advantages(
        samples,
        rewards,
        greedy_scores,
        estimator,
        settings,
        group.all_gather,
        credits=[scored.center_credit() for scored in groups],
    )
    metrics |= divergence
    if algorithm.old_log_probs == "trainer":
        metrics |= await add_rollout_correction(
            samples, algorithm.rollout_correction, group.all_gather
        )
    return metrics


def _rewards(
    response: Completion,
    sample: Sample,
    algorithm: AlgorithmConfig,
    kl_coef: float,
    max_response_length: int,
) -> NDArray[np.float64]:
    """Rewards of a response's tokens, [R]: its score on the last one that counts, and the KL penalty on all."""
    score = response.score
    if algorithm.overlong.buffer_len:
        score += overlong_penalty(
            response.token_ids.size,
            max_response_length=max_response_length,
            overlong_buffer_len=algorithm.overlong.buffer_len,
            penalty_factor=algorithm.overlong.penalty_factor,
        )
    if kl_coef and sample.mask.any():
        log_probs = sample.policy_log_probs
        assert log_probs is not None
        assert sample.ref_log_probs is not None
        kind = algorithm.kl_ctrl.kl_penalty
        return kl_rewards(
            score, log_probs, sample.ref_log_probs, sample.mask, coef=kl_coef, kind=kind
        )
    rewards = np.zeros(sample.mask.shape, np.float64)
    last = -1
    if not sample.mask[last] and sample.mask.any():
        # A response may end in tokens that the policy did not write; rewards there are not read.
        last = np.flatnonzero(sample.mask)[-1]
    rewards[last] = score
    return rewards


def workload_of(model: Path) -> TransformerWorkload:
    """Return the cost model of a Hugging Face folder's architecture; for a mixture of experts, of the active part."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    heads: int = config.num_attention_heads
    dense: int = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    active_experts: int = getattr(config, "num_experts_per_tok", None) or 1
    return TransformerWorkload(
        hidden_size=config.hidden_size,
        intermediate_size=active_experts
        * (getattr(config, "moe_intermediate_size", None) or dense),
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
    )


def has_routers(model: Path) -> bool:
    """Return whether the model in a Hugging Face folder is a mixture of experts."""
    from transformers import AutoConfig

    return hasattr(AutoConfig.from_pretrained(model).get_text_config(), "num_experts_per_tok")


def group_costs(workload: TransformerWorkload, groups: Sequence[Group]) -> list[float]:
    """Return the simulated FLOPs of training on each group, whose prompt is computed once."""
    lengths = [group.lengths for group in groups]
    longest = max(map(len, lengths), default=1)
    padded = np.zeros((len(groups), longest), np.int64)
    for row, group_lengths in zip(padded, lengths, strict=True):
        row[: group_lengths.size] = group_lengths
    return workload.group_flops([group.prompt_ids.size for group in groups], padded).tolist()


def sample_flops(workload: TransformerWorkload, samples: Sequence[Sample]) -> float:
    """Return the simulated FLOPs of training on some samples; a prompt that several share is computed once."""
    lengths: dict[tuple[bytes, int], list[int]] = {}
    for sample in samples:
        lengths.setdefault((sample.prompt_key, sample.prompt_ids.size), []).append(
            sample.response_ids.size
        )
    return sum(
        float(workload.group_flops(prompt, np.array(sizes)))
        for (_, prompt), sizes in lengths.items()
    )


def split_in_micro_batches(
    groups: Sequence[Group],
    *,
    workload: TransformerWorkload,
    max_tokens: int,
    num_multiple: int = 1,
) -> list[list[tuple[int, int]]]:
    """Return micro-batches of (group index, response index) within ``max_tokens`` packed tokens, of about even work.

    A group stays whole, so that its prompt is computed once, unless it exceeds the budget on its own. The number of
    micro-batches is a multiple of ``num_multiple``, unless there are fewer groups.
    """
    units: list[list[tuple[int, int]]] = []
    tokens: list[int] = []
    costs: list[float] = []
    for g, group in enumerate(groups):
        lengths = group.lengths
        capacity = max(1, max_tokens - group.prompt_ids.size)
        parts = [np.arange(lengths.size)]
        if lengths.sum() > capacity:
            parts = micro_batches(lengths, max_tokens=capacity)
        for part in parts:
            units.append([(g, i) for i in part.tolist()])
            tokens.append(group.prompt_ids.size + int(lengths[part].sum()))
            costs.append(float(workload.group_flops(group.prompt_ids.size, lengths[part])))
    if not units:
        return []
    batches = micro_batches(tokens, max_tokens=max_tokens, num_multiple=num_multiple, costs=costs)
    return [
        list(chain.from_iterable(units[i] for i in np.sort(batch)))
        for batch in batches
        if batch.size
    ]


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


def has_signal(metrics: dict[str, float], *, needs_scores: bool) -> bool:
    """Return whether advantages are not 0 beyond rounding errors.

    If it ``needs_scores``, these have to differ: advantages are made of nothing else.
    """
    advantages = [abs(metrics.get(f"critic/advantages/{name}", 0.0)) for name in ("min", "max")]
    low = metrics.get("critic/score/min", 0.0)
    high = metrics.get("critic/score/max", 1.0)
    return (low < high or not needs_scores) and max(advantages) > 1e-6


def samples_to_show(
    trained: Sequence[tuple[Group, Sequence[Sample]]],
    filtered: Sequence[Group],
    step: int,
    tokenizer: Any,
    count: int,
) -> list[tuple[int, dict[str, Any]]]:
    """Return ``count`` of a controller's responses as rows of JSON, each with its number; see `Modality.samples`.

    The numbers are random, and depend on nothing but the step and the response's place in the run: those with the
    lowest are the same for any number of controllers.
    """
    shown: list[tuple[Group, Sequence[Sample | None]]] = [*trained]
    shown.extend((group, [None] * len(group.responses)) for group in filtered)
    responses: list[tuple[int, int, Group, Sample | None]] = []
    for group, samples in shown:
        for i, sample in enumerate(samples):
            number = hash((step, group.prompt_index, i))
            responses.append((number, i, group, sample))
    lowest = heapq.nsmallest(count, responses, key=itemgetter(0))
    return [
        (number, _sample_to_show(group, i, sample, tokenizer))
        for number, i, group, sample in lowest
    ]


def _sample_to_show(
    group: Group, index: int, sample: Sample | None, tokenizer: Any
) -> dict[str, Any]:
    response = group.responses[index]
    versions = response.sampled_versions
    advantage: float | None = None
    advantages = sample and sample.advantages
    if sample is not None and advantages is not None and sample.mask.any():
        advantage = round(float(advantages[sample.mask].mean()), 6)
    row: dict[str, Any] = {
        "prompt_index": group.prompt_index,
        "index": index,
        "is_filtered": sample is None,
        "score": float(response.score),
        "parts": {name: float(value) for name, value in response.parts.items()},
        "advantage": advantage,
        "weight_version": int(versions.max()),
        "oldest_version": int(versions.min()),
        "prompt_tokens": group.prompt_ids.size,
        "response_tokens": response.token_ids.size,
        "stop": response.end or ("length" if response.is_truncated else "stop"),
        "prompt": _decode(tokenizer, group.prompt_ids),
        "response": _decode(tokenizer, response.token_ids),
    }
    if response.mask is not None:
        row["pieces"] = list_pieces(response, partial(_decode, tokenizer), advantages)
    return row


def _decode(tokenizer: Any, token_ids: NDArray[np.int64]) -> str:
    """Return the text with its special tokens; one that is repeated, as for an image, stands once, with its count."""
    text: str = tokenizer.decode(token_ids)
    return _REPEATED.sub(lambda m: f"{m[1]}\N{MULTIPLICATION SIGN}{len(m[0]) // len(m[1])}", text)


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


def speed(flops: float, seconds: float, *, num_devices: int, device: str) -> dict[str, float]:
    """Return the model FLOPs, of forward and backward passes, per second and device, and MFU for a known device."""
    achieved = flops / max(seconds, 1e-9) / num_devices
    metrics = {"perf/tflops/actor": achieved / 1e12}
    if not device.startswith("cuda"):
        return metrics
    import torch

    # On Ray a controller may see no GPU.
    if torch.cuda.is_available():
        with suppress(PlacementError):
            metrics["perf/mfu/actor"] = (
                achieved / Device.matching(torch.cuda.get_device_name(device)).flops_per_s
            )
    return metrics


def memory(device: str) -> dict[str, float]:
    """Return the peak memory of this process so far, in GB: of the host and, on CUDA, of the device."""
    metrics = {"perf/max_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}
    if device.startswith("cuda"):
        import torch

        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / 1e9
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / 1e9
    return metrics
