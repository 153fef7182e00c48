"""What the trainer is compared with: transformers on padded batches, and losses written out again.

Shapes: B sequences, L padded tokens of prompt and response, R padded response tokens, V vocabulary.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedConfig

from gcore_trainer import (
    MicroBatch,
    OptimizerConfig,
    PackedModel,
    PolicyLossConfig,
    PolicyObjective,
    Sample,
    TorchTrainer,
)
from gcore_trainer.lora import A_OF, B_OF

VOCAB_SIZE = 96
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}


def save_model(config: PreTrainedConfig, path: Path, *, seed: int) -> Path:
    """A model whose next-token distributions are neither flat nor certain."""
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path)
    return path


def load_padded(path: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """The model as transformers alone runs it, with masks for the padding.

    Attention is written out in float32, where transformers does softmax in float32 whatever the dtype.
    """
    attention = "eager" if dtype == torch.float32 else "sdpa"
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=attention
    )
    return model


@dataclass(frozen=True)
class Group:
    """Lengths of a prompt and of its responses."""

    prompt_length: int
    response_lengths: list[int]


groups = st.lists(
    st.builds(Group, st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1, max_size=5)),
    min_size=1,
    max_size=4,
)


def make_samples(groups: Iterable[Group], *, seed: int, num_forks: int = 0) -> list[Sample]:
    """Samples in random order, with every per-token array; old log-probs are set by `off_policy`.

    Args:
        num_forks: most forks of a response.
    """
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    for group in groups:
        prompt = rng.integers(0, VOCAB_SIZE, group.prompt_length)
        for length in group.response_lengths:
            mask = rng.random(length) < 0.8
            samples.append(
                Sample(
                    prompt_ids=prompt,
                    response_ids=rng.integers(0, VOCAB_SIZE, length),
                    response_mask=mask if mask.any() else None,
                    advantages=np.full(length, rng.normal(), np.float32),
                )
            )
    samples = [samples[i] for i in rng.permutation(len(samples))]
    if num_forks:
        samples = [fork(s, int(rng.integers(num_forks + 1)), rng) for s in samples]
    return samples


def fork(sample: Sample, num_forks: int, rng: np.random.Generator) -> Sample:
    """The sample with random forks, as many as its response has tokens for; tokens that follow nothing are masked."""
    size = sample.response_ids.size
    starts = np.sort(rng.permutation(np.arange(1, size))[:num_forks])
    parents = np.array([rng.integers(max(-2, start - 9), start) for start in starts], np.int64)
    mask = sample.mask.copy()
    mask[starts[parents == -2]] = False
    return replace(sample, response_mask=mask, forks=np.stack([starts, parents], axis=1))


def off_policy(
    samples: list[Sample], packed: PackedModel, *, seed: int, scale: float = 0.4
) -> list[Sample]:
    """The samples as an older policy wrote them: ratios off 1, and a reference policy somewhere near."""
    rng = np.random.default_rng(seed)

    def near(log_probs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return (log_probs + rng.normal(0, scale, log_probs.shape)).astype(np.float32)

    (log_probs,) = packed.log_probs([samples])
    return [
        replace(s, old_log_probs=near(x), ref_log_probs=near(x), rollout_log_probs=near(x))
        for s, x in zip(samples, log_probs, strict=True)
    ]


def routed(samples: list[Sample], shape: tuple[int, int, int], *, seed: int) -> list[Sample]:
    """Samples with random experts, of ``shape`` (layers, experts, experts a token); those of equal prompts agree."""
    rng = np.random.default_rng(seed)
    num_layers, num_experts, top_k = shape

    def choice(num_tokens: int) -> np.ndarray[Any, np.dtype[np.int16]]:
        return (
            rng.random((num_tokens, num_layers, num_experts))
            .argsort(-1)[..., :top_k]
            .astype(np.int16)
        )

    prompts = {s.prompt_ids.tobytes(): choice(s.prompt_ids.size) for s in samples}
    return [
        replace(
            s,
            routed_experts=np.concatenate(
                [prompts[s.prompt_ids.tobytes()], choice(s.response_ids.size - 1)]
            ),
        )
        for s in samples
    ]


def truncated(samples: list[Sample], *, seed: int) -> list[Sample]:
    """Samples of which most tokens were drawn from a few others and themselves, and the rest from all."""
    rng = np.random.default_rng(seed)
    cut: list[Sample] = []
    for sample in samples:
        sets: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        for token in sample.response_ids:
            others = rng.permutation(VOCAB_SIZE)[: rng.integers(0, 12)]
            sets.append(np.union1d(others, token) if rng.random() < 0.8 else others[:0])
        counts = np.array([ids.size for ids in sets], np.int32)
        ids = np.concatenate(sets).astype(np.int32)
        cut.append(replace(sample, kept_counts=counts, kept_ids=ids))
    return cut


def split(samples: list[Sample], *, seed: int) -> list[MicroBatch]:
    """Random micro-batches, of one sample or more."""
    rng = np.random.default_rng(seed)
    ends = np.flatnonzero(rng.random(len(samples) - 1) < 0.4) + 1
    bounds = [0, *ends.tolist(), len(samples)]
    return [samples[a:b] for a, b in pairwise(bounds)]


@dataclass(frozen=True)
class PaddedScores:
    """All shape [B, R]."""

    log_probs: torch.Tensor
    entropies: torch.Tensor
    mask: torch.Tensor


def padded_scores(model: Any, samples: list[Sample], *, temperature: float = 1.0) -> PaddedScores:
    """Every sample with its own copy of the prompt, padded on the right to the longest."""
    sequences = [torch.from_numpy(np.concatenate([s.prompt_ids, s.response_ids])) for s in samples]
    ids_BL = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    seen_BL = torch.nn.utils.rnn.pad_sequence(
        [torch.ones_like(x) for x in sequences], batch_first=True
    )
    logits_BLV = model(input_ids=ids_BL, attention_mask=seen_BL).logits / temperature
    log_probs: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    for sample, logits_LV in zip(samples, logits_BLV, strict=True):
        start = sample.prompt_ids.size - 1
        logits_RV = logits_LV[start : start + sample.response_ids.size]
        log_probs_RV = logits_RV.masked_fill(left_out(sample, logits_RV), -torch.inf).log_softmax(
            -1
        )
        log_probs.append(
            log_probs_RV.gather(1, torch.from_numpy(sample.response_ids)[:, None])[:, 0]
        )
        entropies.append(torch.distributions.Categorical(logits=log_probs_RV).entropy())
    return PaddedScores(
        log_probs=torch.nn.utils.rnn.pad_sequence(log_probs, batch_first=True),
        entropies=torch.nn.utils.rnn.pad_sequence(entropies, batch_first=True),
        mask=torch.nn.utils.rnn.pad_sequence(
            [torch.from_numpy(_mask(s)) for s in samples], batch_first=True
        ).float(),
    )


def left_out(sample: Sample, logits_RV: torch.Tensor) -> torch.Tensor:
    """Which tokens the engine left out at each token of the response."""
    is_left_out_RV = torch.zeros_like(logits_RV, dtype=torch.bool)
    if sample.kept_counts is not None and sample.kept_ids is not None:
        sets = np.split(sample.kept_ids, sample.kept_counts.cumsum()[:-1])
        for row, ids in zip(is_left_out_RV, sets, strict=True):
            row[:] = ids.size > 0
            row[ids.tolist()] = False
    return is_left_out_RV


def padded_loss(
    model: Any, samples: list[Sample], config: PolicyLossConfig, *, temperature: float = 1.0
) -> torch.Tensor:
    """The policy loss in the papers' words: rows are sequences, none is left out."""
    scores = padded_scores(model, samples, temperature=temperature)
    log_probs_BR = scores.log_probs
    advantages_BR = _rows([s.advantages for s in samples], log_probs_BR.detach())
    ratio_BR = (
        log_probs_BR - _rows([s.old_log_probs for s in samples], log_probs_BR.detach())
    ).exp()
    clipped_BR = ratio_BR.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    objective_BR = torch.min(ratio_BR * advantages_BR, clipped_BR * advantages_BR)
    if config.clip_ratio_c is not None:
        bounded_BR = torch.max(objective_BR, config.clip_ratio_c * advantages_BR)
        objective_BR = torch.where(advantages_BR < 0, bounded_BR, objective_BR)
    loss_BR = -objective_BR - config.entropy_coeff * scores.entropies
    if config.kl_loss_coef:
        log_ratio_BR = (
            _rows([s.ref_log_probs for s in samples], log_probs_BR.detach()) - log_probs_BR
        )
        kl_BR = {
            "k1": -log_ratio_BR,
            "k2": log_ratio_BR**2 / 2,
            "k3": log_ratio_BR.exp() - log_ratio_BR - 1,
        }
        loss_BR = loss_BR + config.kl_loss_coef * kl_BR[config.kl_loss_type]
    mask_BR = scores.mask
    sums_B = (loss_BR * mask_BR).sum(1)
    match config.loss_agg_mode:
        case "token-mean":
            return sums_B.sum() / mask_BR.sum()
        case "seq-mean-token-sum":
            return sums_B.mean()
        case "seq-mean-token-mean":
            return (sums_B / mask_BR.sum(1).clamp(min=1)).mean()
        case "seq-mean-token-sum-norm":
            assert config.max_response_length is not None
            return sums_B.mean() / config.max_response_length


def packed_gradients(
    packed: PackedModel, micro_batches: list[MicroBatch], config: PolicyLossConfig, **options: float
) -> tuple[float, dict[str, torch.Tensor]]:
    """Policy loss and gradients of one `TorchTrainer.train_step` that changes nothing."""
    optimizer = OptimizerConfig(lr=1e-30, grad_clip=float("inf"))
    metrics = TorchTrainer(
        packed, optimizer=optimizer, objective=PolicyObjective(config, options)
    ).train_step(micro_batches)
    loss = metrics["actor/pg_loss"] + config.kl_loss_coef * metrics.get("actor/kl_loss", 0.0)
    return loss, gradients(packed.model)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Copies of the gradients, which are then cleared."""
    result = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return result


def deviation(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of any entry, over the largest entry: relative to the scale of the whole gradient.

    A gradient whose tokens are all clipped is zero; below 1e-4 the difference is relative to that.
    """
    assert actual.keys() == expected.keys()
    scale = max(1e-4, *(g.abs().max().item() for g in expected.values()))
    return max((actual[name] - g).abs().max().item() for name, g in expected.items()) / scale


def nearest_merge_share(
    exported: Mapping[str, torch.Tensor],
    base: Mapping[str, torch.Tensor],
    adapters: Mapping[str, torch.Tensor],
    scale: float,
) -> float:
    """Share of the entries of adapted weights that are W + scale B A in float64, rounded once.

    Args:
        exported: weights with the adapters in them.
        base: the weights beneath, in the same data type.
        adapters: by peft's names.
        scale: alpha / rank.
    """
    are_nearest: list[torch.Tensor] = []
    for name, tensor in exported.items():
        layer = name.removesuffix(".weight")
        if layer + A_OF in adapters:
            a, b = (adapters[layer + end].double() for end in (A_OF, B_OF))
            are_nearest.append(
                (tensor == (base[name].double() + scale * (b @ a)).to(tensor.dtype)).flatten()
            )
    return torch.cat(are_nearest).double().mean().item()


def _mask(sample: Sample) -> np.ndarray[Any, Any]:
    return (
        np.ones(sample.response_ids.size, np.bool_)
        if sample.response_mask is None
        else sample.response_mask
    )


def _rows(arrays: list[Any], default_BR: torch.Tensor) -> torch.Tensor:
    if arrays[0] is None:
        return default_BR
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(a) for a in arrays], batch_first=True)
