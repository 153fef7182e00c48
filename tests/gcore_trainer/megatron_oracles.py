"""Models for Megatron tests, and what their trainers are compared with: transformers and AdamW in one process."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trainer_oracles import (
    SIZES,
    Group,
    load_padded,
    make_samples,
    padded_loss,
    padded_scores,
    save_model,
    split,
)
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from gcore_trainer import MicroBatch, OptimizerConfig, PolicyLossConfig, Sample

FOUR_LAYERS: dict[str, Any] = SIZES | {"num_hidden_layers": 4}
"""For layouts of two stages of two chunks each."""
ODD_VOCABULARY: dict[str, Any] = {"vocab_size": 97}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE: dict[str, Any] = {
    "head_dim": 24,
    "moe_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
    "qwen2": Qwen2Config(**SIZES | ODD_VOCABULARY, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**FOUR_LAYERS | ODD_VOCABULARY, head_dim=24, tie_word_embeddings=False),
    "qwen3_tied": Qwen3Config(**FOUR_LAYERS, head_dim=24, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **MOE, norm_topk_prob=True),
    "qwen3_moe_deep": Qwen3MoeConfig(**FOUR_LAYERS, **MOE, norm_topk_prob=True),
    "qwen3_moe_raw": Qwen3MoeConfig(**SIZES, **MOE, norm_topk_prob=False),
}
GROUPS = [Group(12, [20, 1, 9, 13]), Group(25, [7, 7]), Group(3, [25])]
LOSS = PolicyLossConfig(kl_loss_coef=0.1, entropy_coeff=0.01, loss_agg_mode="seq-mean-token-mean")
OPTIMIZER = OptimizerConfig(
    lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, lr_warmup_steps=3, grad_clip=0.05
)
TP, PP, VPP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)
CP, ULYSSES, EP = (
    "context_parallel_size",
    "ulysses_sequence_parallel_size",
    "expert_model_parallel_size",
)
SP = "sequence_parallel"
GROUPS_OF_STATE = ("model", "exp_avg", "exp_avg_sq")


def save_megatron_model(name: str, root: Path) -> Path:
    """A random model, as a Hugging Face folder; made once."""
    path = root / name
    return path if path.exists() else save_model(CONFIGS[name], path, seed=len(name))


def data_parallel_size(size: int, layout: dict[str, Any]) -> int:
    """Replicas of a world."""
    return size // (layout.get(TP, 1) * layout.get(PP, 1) * layout.get(CP, 1))


def data_parallel_rank(rank: int, size: int, layout: dict[str, Any]) -> int:
    """Of a rank, in Megatron's order: tensor, context, data, pipeline."""
    return rank // (layout.get(TP, 1) * layout.get(CP, 1)) % data_parallel_size(size, layout)


def uneven(samples: list[Sample], num_replicas: int, *, seed: int) -> list[list[MicroBatch]]:
    """Micro-batches of each replica: one of the first, what remains of the others."""
    micro_batches = split(samples, seed=seed)
    if num_replicas == 1:
        return [micro_batches]
    return [
        micro_batches[:1],
        *(micro_batches[i :: num_replicas - 1] for i in range(1, num_replicas)),
    ]


@dataclass(frozen=True, kw_only=True)
class Plain:
    """A model trained by AdamW in one process, in float64."""

    samples: list[list[Sample]]
    """Of each step."""
    grad_norms: list[float]
    tensors: list[dict[str, dict[str, torch.Tensor]]]
    """``model``, ``exp_avg`` and ``exp_avg_sq`` after each step."""


def train_plainly(path: Path, num_steps: int) -> Plain:
    """Steps of `LOSS` and `OPTIMIZER`, each on new samples of an older policy."""
    model = load_padded(path, dtype=torch.float64)
    if "moe" in model.config.model_type:
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=0.0,
        betas=OPTIMIZER.betas,
        weight_decay=OPTIMIZER.weight_decay,
        foreach=False,
    )
    plain = Plain(samples=[], grad_norms=[], tensors=[])
    for step in range(num_steps):
        samples = _off_policy(model, make_samples(GROUPS, seed=step), seed=step)
        optimizer.zero_grad()
        padded_loss(model, samples, LOSS).backward()
        plain.grad_norms.append(
            torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.grad_clip).item()
        )
        optimizer.param_groups[0]["lr"] = OPTIMIZER.lr * min(
            1.0, (step + 1) / OPTIMIZER.lr_warmup_steps
        )
        optimizer.step()
        plain.samples.append(samples)
        moments = {name: optimizer.state[p] for name, p in model.named_parameters()}
        plain.tensors.append(
            {
                "model": {name: p.detach().clone() for name, p in model.named_parameters()},
                "exp_avg": {name: m["exp_avg"].clone() for name, m in moments.items()},
                "exp_avg_sq": {name: m["exp_avg_sq"].clone() for name, m in moments.items()},
            }
        )
    return plain


def assembled(boxes: Iterable[Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Whole tensors of all ranks' parts; NaN where no rank has a part."""
    whole: dict[str, dict[str, torch.Tensor]] = {group: {} for group in GROUPS_OF_STATE}
    for group, name, global_shape, offset, tensor in boxes:
        target = whole[group].setdefault(name, torch.full(global_shape, float("nan")))
        target[tuple(slice(o, o + s) for o, s in zip(offset, tensor.shape, strict=True))] = tensor
    return whole


def largest_difference(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of any entry, relative to the largest entry of all; NaN is the largest of all."""
    assert actual.keys() == expected.keys()
    scale = max(t.abs().max().item() for t in expected.values())
    differences = [
        (actual[name].double() - t.double()).abs().max().item() for name, t in expected.items()
    ]
    return float("inf") if np.isnan(differences).any() else max(differences) / scale


def _off_policy(model: Any, samples: list[Sample], *, seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        rows = padded_scores(model, samples).log_probs.numpy()

    def near(row: Any, sample: Sample) -> Any:
        length = sample.response_ids.size
        return (row[:length] + rng.normal(0, 0.4, length)).astype(np.float32)

    return [
        replace(s, old_log_probs=near(r, s), ref_log_probs=near(r, s))
        for s, r in zip(samples, rows, strict=True)
    ]
