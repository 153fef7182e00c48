"""The simulated work of training on samples, and micro-batches of even work that fit in memory."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gcore_placement import TransformerWorkload, micro_batches
from gcore_rollout import Group
from gcore_trainer import Sample


def workload_of(model: Path) -> TransformerWorkload:
    """Return the cost model of a Hugging Face folder's architecture; for a mixture of experts, of the active part."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config()
    heads: int = config.num_attention_heads
    dense: int = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    active_experts: int = getattr(config, "num_experts_per_tok", None) or 1
    return TransformerWorkload(
        hidden_size=config.hidden_size,
        intermediate_size=active_experts * (getattr(config, "moe_intermediate_size", None) or dense),
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab_size=config.vocab_size,
    )


def group_costs(workload: TransformerWorkload, groups: Sequence[Group]) -> list[float]:
    """Return the simulated FLOPs of training on each group, whose prompt is computed once."""
    lengths = [group.lengths for group in groups]
    padded = np.zeros((len(groups), max((own.size for own in lengths), default=1)), np.int64)
    for row, own in zip(padded, lengths, strict=True):
        row[: own.size] = own
    return workload.group_flops([group.prompt_ids.size for group in groups], padded).tolist()


def sample_flops(workload: TransformerWorkload, samples: Sequence[Sample]) -> float:
    """Return the simulated FLOPs of training on some samples; a prompt that several share is computed once."""
    lengths: dict[bytes, list[int]] = {}
    prompts: dict[bytes, int] = {}
    for sample in samples:
        key = sample.prompt_key
        prompts[key] = sample.prompt_ids.size
        lengths.setdefault(key, []).append(sample.response_ids.size)
    return sum(float(workload.group_flops(prompts[key], np.array(found))) for key, found in lengths.items())


def split_in_micro_batches(
    groups: Sequence[Group], *, workload: TransformerWorkload, max_tokens: int, num_multiple: int = 1
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
        whole = [np.arange(lengths.size)]
        for part in whole if lengths.sum() <= capacity else micro_batches(lengths, max_tokens=capacity):
            units.append([(g, i) for i in part.tolist()])
            tokens.append(group.prompt_ids.size + int(lengths[part].sum()))
            costs.append(float(workload.group_flops(group.prompt_ids.size, lengths[part])))
    if not units:
        return []
    return [
        [pair for unit in np.sort(batch).tolist() for pair in units[unit]]
        for batch in micro_batches(tokens, max_tokens=max_tokens, num_multiple=num_multiple, costs=costs)
        if batch.size
    ]
