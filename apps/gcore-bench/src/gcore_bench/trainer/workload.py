"""The step that every contender makes: groups of responses with a long tail of lengths, and each contender's batches.

Indices are of samples in group order: sample i answers prompt i // n. Importing this module imports no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

from gcore_bench.harness.models import small_shape
from gcore_bench.harness.report import Figures
from gcore_bench.trainer.options import TrainerOptions
from gcore_llm.learning.preparation import sample_flops, split_in_micro_batches
from gcore_placement import TransformerWorkload, balance, micro_batches
from gcore_rollout import Completion, Group
from gcore_trainer import Sample, pack

LONG_VOCAB_SIZE = 512
BALANCE_RANKS = 2
"""Ranks of the part balance."""
BATCHINGS = ("trl", "gcore-padded", "gcore-packed", "gcore-shared")
"""Contenders whose ways of batching differ; verl receives those of gcore-packed, gcore-masks those of gcore-shared."""


def step_workload(options: TrainerOptions) -> TransformerWorkload:
    """Return the shape of the step's model."""
    return small_shape(options.hidden_size, layers=4, heads=4, vocab_size=options.vocab_size)


def long_workload(options: TrainerOptions) -> TransformerWorkload:
    """Return the shape of the model of the part context; Ulysses ranks divide its heads."""
    return small_shape(options.hidden_size, layers=2, heads=8, vocab_size=LONG_VOCAB_SIZE)


def memory_lengths(options: TrainerOptions) -> dict[str, list[int]]:
    """Return the workloads of the part memory: the lengths of the responses to one prompt."""
    found = {equal_workload(length): [length] * 8 for length in options.shared_lengths}
    limit, rng = options.max_lognormal_length, np.random.default_rng(options.seed)
    drawn = (limit / 4 * np.exp(rng.normal(size=8))).astype(int).clip(16, limit)
    return found | {lognormal_workload(options): drawn.tolist()}


def equal_workload(length: int) -> str:
    """Return the name of a workload of the part memory, of responses of one length."""
    return f"8 x {length:,}"


def lognormal_workload(options: TrainerOptions) -> str:
    """Return the name of the workload of the part memory whose lengths are lognormal."""
    return f"lognormal to 8 x {options.max_lognormal_length:,}"


def too_large_masks(options: TrainerOptions) -> dict[str, float]:
    """Return the size, in 10^9 bytes, of the float32 masks above the limit, by workload of the part memory."""
    sizes = {
        name: 4e-9 * sum(n * (n + options.max_prompt_length) for n in lengths)
        for name, lengths in memory_lengths(options).items()
    }
    return {name: gb for name, gb in sizes.items() if gb > options.max_mask_gb}


def context_layouts(sizes: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Return the contenders of the part context: context-parallel size, and ranks that exchange heads."""
    found: dict[str, tuple[int, int]] = {}
    for size in sizes:
        if size == 1:
            found["alone"] = (1, 1)
        else:
            found |= {f"ulysses-{size}": (size, size), f"ring-{size}": (size, 1)}
    return found


def make_samples(options: TrainerOptions) -> list[Sample]:
    """Return the step's samples, with advantages, and without old log-probs."""
    rng = np.random.default_rng(options.seed)
    samples: list[Sample] = []
    for _ in range(options.prompts):
        prompt_length = int(rng.integers(-(-options.max_prompt_length // 3), options.max_prompt_length + 1))
        prompt = rng.integers(1, options.vocab_size, prompt_length)
        scores = rng.normal(size=options.n)
        for score in scores - scores.mean():
            length = round(options.median_length * float(np.exp(options.sigma * rng.normal())))
            response = rng.integers(1, options.vocab_size, min(max(length, 1), options.max_response_length))
            advantages = np.full(response.size, score, np.float32)
            samples.append(Sample(prompt_ids=prompt, response_ids=response, advantages=advantages))
    return samples


def step_batches(options: TrainerOptions, samples: Sequence[Sample], contender: str) -> list[list[int]]:
    """Return a contender's micro-batches: equal counts, or single samples or whole groups within the budget."""
    match contender:
        case "trl" | "gcore-padded":
            return [part.tolist() for part in np.array_split(np.arange(len(samples)), options.padded_micro_batches)]
        case "gcore-masks" | "gcore-shared":
            return _shared_batches(options, samples, range(options.prompts))
        case _:
            lengths = [s.prompt_ids.size + s.response_ids.size for s in samples]
            costs = step_workload(options).flops(lengths)
            return [part.tolist() for part in micro_batches(lengths, max_tokens=options.max_tokens, costs=costs)]


def _shared_batches(
    options: TrainerOptions, samples: Sequence[Sample], prompts: range, *, num_multiple: int = 1
) -> list[list[int]]:
    """Return the micro-batches that gcore-llm makes of the groups of these prompts."""
    groups = [_group(prompt, samples[prompt * options.n : (prompt + 1) * options.n]) for prompt in prompts]
    limits = {"max_tokens": options.max_tokens, "num_multiple": num_multiple}
    parts = split_in_micro_batches(groups, workload=step_workload(options), **limits)
    return [[prompts[g] * options.n + i for g, i in part] for part in parts]


def _group(prompt: int, samples: Sequence[Sample]) -> Group:
    nothing: Any = np.zeros(0)
    unscored: dict[str, Any] = {"log_probs": nothing, "weight_versions": nothing, "finish_reason": "stop"}
    responses = [
        Completion(request_id="", index=i, token_ids=s.response_ids, **unscored) for i, s in enumerate(samples)
    ]
    return Group(prompt_index=prompt, prompt_ids=samples[0].prompt_ids, responses=responses)


@dataclass(frozen=True, kw_only=True)
class Deal:
    """Micro-batches of several ranks."""

    batches: list[list[list[int]]]
    """Indices of samples, by rank and pass."""
    costs: list[list[float]]
    """Simulated FLOPs, by rank and pass."""

    @property
    def num_passes(self) -> int:
        """Passes of the rank that has most."""
        return max(len(batches) for batches in self.batches)

    @property
    def imbalance(self) -> Figures:
        """Cost of the busiest rank over the mean, and the same where ranks wait for each other in every pass."""
        mean = sum(map(sum, self.costs)) / len(self.costs)
        slowest = sum(map(max, zip_longest(*self.costs, fillvalue=0.0)))
        return {"ranks": max(map(sum, self.costs)) / mean, "passes": slowest / mean}


def deals(options: TrainerOptions, samples: Sequence[Sample]) -> dict[str, Deal]:
    """Return the two distributions of the part balance: whole groups over ranks in turn, and by simulated work."""
    ranks, prompts = range(BALANCE_RANKS), range(options.prompts)

    def cost(batch: Sequence[int]) -> float:
        return sample_flops(step_workload(options), [samples[i] for i in batch])

    # The heaviest first, so that the passes of the ranks are alike.
    batches = _shared_batches(options, samples, prompts, num_multiple=BALANCE_RANKS)
    batches.sort(key=cost, reverse=True)
    owners = balance([cost(batch) for batch in batches], BALANCE_RANKS)
    by_rank = {
        "round-robin": [_shared_batches(options, samples, prompts[rank::BALANCE_RANKS]) for rank in ranks],
        "balanced": [[batches[k] for k in owned.tolist()] for owned in owners],
    }
    return {
        name: Deal(batches=found, costs=[[cost(batch) for batch in own] for own in found])
        for name, found in by_rank.items()
    }


def token_rows(options: TrainerOptions, samples: Sequence[Sample]) -> dict[str, Figures]:
    """Return the tokens that each way of batching computes, and the fractions that are of samples, and needed.

    Needed are each distinct prompt once and each response, less its last token, which predicts nothing.
    """
    prompts = {s.prompt_ids.tobytes(): s.prompt_ids.size for s in samples}
    inner = sum(s.response_ids.size - 1 for s in samples)
    needed = sum(prompts.values()) + inner
    given = sum(s.prompt_ids.size for s in samples) + inner
    rows: dict[str, Figures] = {}
    for name in BATCHINGS:
        computed = _computed_tokens(options, samples, name)
        rows[name] = {
            "computed": float(computed),
            # Shared prompts make fewer tokens than the samples have, and no padding.
            "real_fraction": min(given, computed) / computed,
            "needed_fraction": needed / computed,
        }
    return rows


def _computed_tokens(options: TrainerOptions, samples: Sequence[Sample], contender: str) -> int:
    """Count the tokens that pass through the layers in one step."""
    batches = [[samples[i] for i in batch] for batch in step_batches(options, samples, contender)]
    match contender:
        case "trl":
            width = max(s.prompt_ids.size for s in samples) + max(s.response_ids.size for s in samples)
            return len(samples) * width
        case "gcore-padded":
            return sum(len(b) * max(s.num_inputs for s in b) for b in batches)
        case _:
            return sum(pack(b, share_prefix=contender == "gcore-shared").input_ids.size for b in batches)
