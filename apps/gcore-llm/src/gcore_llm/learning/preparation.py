"""From scored groups to what the policy and the critic learn from, in micro-batches; and the metrics of that work."""

import heapq
import re
import resource
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_controller import Collectives
from gcore_llm.learning.config import AlgorithmConfig
from gcore_llm.learning.pieces import list_pieces
from gcore_placement import Device, PlacementError, TransformerWorkload, micro_batches
from gcore_rollout import Completion, Group, PromptImages
from gcore_trainer import (
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
)

GAME_COLUMN = "data_source"
"""Column of a row that names the game whose roles have baselines."""
_READ = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "values", "sharp_log_probs")
"""Arrays of a sample that advantages and corrections are made of."""
_REPEATED = re.compile(r"(<[^<>\s]+>)\1{3,}")


def unscored_samples(group: Group, algorithm: AlgorithmConfig) -> list[Sample]:
    """Return the samples to train on, without advantages yet; no token of a filtered response counts."""
    prompt_images = read_images(group.images)
    samples: list[Sample] = []
    for response in group.responses:
        mask = response.mask
        if response.is_truncated and algorithm.overlong.filter:
            mask = np.zeros(response.token_ids.shape, np.bool_)
        sample = Sample(
            prompt_ids=group.prompt_ids,
            response_ids=response.token_ids,
            response_mask=mask,
            environment_mask=_environment_mask(response) if algorithm.learns_environment else None,
            old_log_probs=response.log_probs if algorithm.old_log_probs == "rollout" else None,
            rollout_log_probs=response.log_probs,
            images=read_images(response.images) or prompt_images,
            forks=response.forks,
            kept_counts=response.kept_counts,
            kept_ids=response.kept_ids,
        )
        if response.routed_experts is not None:
            sample.routed_experts = response.routed_experts[sample.input_index]
        samples.append(sample)
    return samples


def _environment_mask(response: Completion) -> NDArray[np.bool_] | None:
    """Return which tokens [R] an episode's environment wrote after others; None: none is text to be predicted."""
    if response.mask is None or response.images is not None:
        return None
    mask = response.weight_versions < 0
    if response.forks is not None:
        starts, parents = response.forks.T
        mask[starts[parents == -2]] = False
    return mask


def read_images(images: PromptImages | None) -> Images | None:
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
    baselines: dict[str, float],
    max_response_length: int,
    group: Collectives,
) -> dict[str, float]:
    """Set advantages, and what else the estimator and the correction give, of the samples of this controller's groups.

    Args:
        samples: of each group, with the log-probs and values that the algorithm asks for.
        kl: updated with the batch's divergence; the same on all controllers.
        baselines: of roles, updated for an estimator that moves them; the same on all controllers.

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
    estimator = get_advantage_estimator(algorithm.adv_estimator)
    greedy_scores = [g.greedy_score for g in groups]
    credits: list[list[NDArray[np.float32] | None]] = []
    if estimator.moves_baselines:
        credits = await _compare_with_roles(groups, baselines, group, **algorithm.advantage_options)
    elif not (estimator.reads_turns or estimator.reads_steps):
        credits = [scored.center_credit() for scored in groups]
    metrics = await add_advantages(
        samples,
        rewards,
        greedy_scores,
        estimator,
        algorithm.advantage_options,
        group.all_gather,
        credits=credits,
        parts=[[response.parts for response in scored.responses] for scored in groups],
        turns=[[response.scored_turns() for response in scored.responses] for scored in groups],
    )
    metrics |= divergence
    if algorithm.old_log_probs == "trainer":
        metrics |= await add_rollout_correction(
            samples, algorithm.rollout_correction, group.all_gather
        )
    return metrics


async def _compare_with_roles(
    groups: Sequence[Group],
    baselines: dict[str, float],
    collectives: Collectives,
    *,
    ema_decay: float,
) -> list[list[NDArray[np.float32] | None]]:
    """Return the credit of turns less the baselines of their roles, and update these by the batch, in its order."""
    returns: list[tuple[int, int, str, str, float]] = []
    for group in groups:
        game = str(group.columns.get(GAME_COLUMN, ""))
        for response in group.responses:
            for agent, value in response.mean_credit().items():
                returns.append((group.prompt_index, response.index, agent, game, value))
    everyones = chain.from_iterable(await collectives.all_gather(returns))
    earlier: dict[tuple[int, int, str], float] = {}
    for prompt_index, index, agent, game, value in sorted(everyones):
        role = f"{game}/{agent}"
        baseline = baselines.get(role, 0.0)
        earlier[prompt_index, index, agent] = baseline
        baselines[role] = ema_decay * baseline + (1 - ema_decay) * value
    return [group.center_credit(earlier) for group in groups]


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
    return [float(workload.group_flops(group.prompt_ids.size, group.lengths)) for group in groups]


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
