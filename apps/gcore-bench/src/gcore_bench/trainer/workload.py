"""What every contender trains on: groups of responses with a long tail of lengths, and how each one batches them.

Indices are of samples in group order: sample i answers prompt i // n.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_bench.trainer.options import TrainerOptions
from gcore_placement import TransformerWorkload, balance, micro_batches
from gcore_trainer import Sample

_OFF_POLICY = 0.1
"""Standard deviation of what is added to log-probabilities to stand for an older policy's: some ratios are clipped."""


def make_samples(options: TrainerOptions) -> list[Sample]:
    """The step's samples, with advantages, and without old log-probs."""
    rng = np.random.default_rng(options.seed)
    samples: list[Sample] = []
    for _ in range(options.prompts):
        prompt = _tokens(
            rng, options, int(rng.integers(-(-options.max_prompt_length // 3), options.max_prompt_length + 1))
        )
        scores = rng.normal(size=options.n)
        for score in scores - scores.mean():
            length = round(options.median_length * float(np.exp(options.sigma * rng.normal())))
            response = _tokens(rng, options, min(max(length, 1), options.max_response_length))
            advantages = np.full(response.size, score, np.float32)
            samples.append(Sample(prompt_ids=prompt, response_ids=response, advantages=advantages))
    return samples


def _tokens(rng: np.random.Generator, options: TrainerOptions, length: int) -> NDArray[np.int64]:
    return rng.integers(1, options.vocab_size, length)


def off_policy(samples: Sequence[Sample], log_probs: Sequence[NDArray[np.float32]], *, seed: int) -> list[Sample]:
    """The samples as if a policy close by had written them."""
    rng = np.random.default_rng(seed)
    return [
        replace(s, old_log_probs=(lp + rng.normal(0.0, _OFF_POLICY, lp.shape)).astype(np.float32))
        for s, lp in zip(samples, log_probs, strict=True)
    ]


def save_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write them where a contender's process finds them."""
    arrays: dict[str, Any] = {}
    for i, sample in enumerate(samples):
        for field in ("prompt_ids", "response_ids", "advantages", "old_log_probs"):
            arrays[f"{field}-{i}"] = getattr(sample, field)
    np.savez(path, allow_pickle=False, **arrays)


def load_samples(path: Path) -> list[Sample]:
    """What `save_samples` wrote."""
    with np.load(path) as arrays:
        return [
            Sample(
                prompt_ids=arrays[f"prompt_ids-{i}"],
                response_ids=arrays[f"response_ids-{i}"],
                advantages=arrays[f"advantages-{i}"],
                old_log_probs=arrays[f"old_log_probs-{i}"],
            )
            for i in range(len(arrays.files) // 4)
        ]


def padded_batches(samples: Sequence[Sample], count: int) -> list[list[int]]:
    """Equal numbers of samples, in their order."""
    return [part.tolist() for part in np.array_split(np.arange(len(samples)), count)]


def packed_batches(samples: Sequence[Sample], workload: TransformerWorkload, max_tokens: int) -> list[list[int]]:
    """Single samples within the budget, of even simulated cost."""
    lengths = [s.prompt_ids.size + s.response_ids.size for s in samples]
    parts = micro_batches(lengths, max_tokens=max_tokens, costs=workload.flops(lengths))
    return [part.tolist() for part in parts]


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """Responses to one prompt that stay together."""

    members: list[int]
    tokens: int
    cost: float


def shared_batches(
    samples: Sequence[Sample], workload: TransformerWorkload, max_tokens: int, *, n: int
) -> list[list[int]]:
    """Whole groups within the budget, of even simulated cost; a group above it is parted."""
    units = [u for group in _groups(range(len(samples)), n) for u in _units(samples, group, workload, max_tokens)]
    parts = micro_batches([u.tokens for u in units], max_tokens=max_tokens, costs=[u.cost for u in units])
    return [[i for u in part.tolist() for i in units[u].members] for part in parts]


def _groups(indices: Sequence[int], n: int) -> list[list[int]]:
    return [list(indices[k : k + n]) for k in range(0, len(indices), n)]


def _units(samples: Sequence[Sample], group: list[int], workload: TransformerWorkload, max_tokens: int) -> list[_Unit]:
    prompt_length = samples[group[0]].prompt_ids.size
    lengths = np.array([samples[i].response_ids.size for i in group])
    return [
        _Unit(
            members=[group[k] for k in part.tolist()],
            tokens=prompt_length + int(lengths[part].sum()),
            cost=float(workload.group_flops(prompt_length, lengths[part])),
        )
        for part in micro_batches(lengths, max_tokens=max_tokens - prompt_length)
    ]


@dataclass(frozen=True, kw_only=True)
class Deal:
    """Micro-batches of each of several ranks."""

    batches: list[list[list[int]]]
    """[rank][pass] indices of samples."""
    costs: list[list[float]]
    """Simulated FLOPs of each."""

    @property
    def rank_imbalance(self) -> float:
        """Largest cost of a rank over their mean."""
        totals = [sum(costs) for costs in self.costs]
        return max(totals) / (sum(totals) / len(totals))

    @property
    def pass_imbalance(self) -> float:
        """The same where ranks wait for each other in every pass, as sharded parameters make them."""
        passes = max(len(costs) for costs in self.costs)
        slowest = sum(max((c[k] for c in self.costs if k < len(c)), default=0.0) for k in range(passes))
        return slowest / (sum(sum(costs) for costs in self.costs) / len(self.costs))


def deal(
    samples: Sequence[Sample], workload: TransformerWorkload, max_tokens: int, *, n: int, ranks: int, balanced: bool
) -> Deal:
    """Micro-batches of whole groups for each rank: of even cost, heaviest first; or one after the other, in order."""
    units = [u for group in _groups(range(len(samples)), n) for u in _units(samples, group, workload, max_tokens)]
    if balanced:
        parts = micro_batches(
            [u.tokens for u in units], max_tokens=max_tokens, costs=[u.cost for u in units], num_multiple=ranks
        )
        found = [[units[k] for k in part.tolist()] for part in parts if part.size]
        order = sorted(found, key=lambda batch: -sum(u.cost for u in batch))
        owners = balance([sum(u.cost for u in batch) for batch in order], ranks)
        dealt = [[order[k] for k in owned.tolist()] for owned in owners]
    else:
        dealt = [_filled(units[rank::ranks], max_tokens) for rank in range(ranks)]
    return Deal(
        batches=[[[i for u in batch for i in u.members] for batch in batches] for batches in dealt],
        costs=[[sum(u.cost for u in batch) for batch in batches] for batches in dealt],
    )


def _filled(units: Sequence[_Unit], max_tokens: int) -> list[list[_Unit]]:
    """One micro-batch after the other, each taken as long as the next unit fits."""
    batches: list[list[_Unit]] = []
    for unit in units:
        if batches and sum(u.tokens for u in batches[-1]) + unit.tokens <= max_tokens:
            batches[-1].append(unit)
        else:
            batches.append([unit])
    return batches
