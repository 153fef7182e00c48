"""Loss and gradients do not depend on packing, splitting, prompt sharing or skipping.

Each is compared with one padded batch of ordinary attention masks, where nothing is shared, split or skipped. A
gradient's deviation is its largest difference in any entry over the largest entry of the whole gradient. In float64 it
is below 1e-6 whatever the batch (transformers' norms and our weights stay float32); in float32 both sides are a few
1e-6 from the float64 gradient, so their difference is bounded by 2e-5.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from trainer_oracles import (
    Group,
    deviation,
    gradients,
    groups,
    load_padded,
    make_samples,
    off_policy,
    packed_gradients,
    padded_loss,
    split,
    truncated,
)

from gcore_trainer import MicroBatch, PackedModel, PolicyLossConfig, Sample

CONFIGS: dict[str, PolicyLossConfig] = {
    "dapo": PolicyLossConfig(),
    "grpo with k3": PolicyLossConfig(loss_agg_mode="seq-mean-token-mean", kl_loss_coef=0.1),
    "dr grpo, dual clip": PolicyLossConfig(
        loss_agg_mode="seq-mean-token-sum-norm", clip_ratio_c=1.2, max_response_length=40
    ),
    "sums, entropy and k2": PolicyLossConfig(
        loss_agg_mode="seq-mean-token-sum", entropy_coeff=0.05, kl_loss_coef=0.1, kl_loss_type="k2"
    ),
    "k1": PolicyLossConfig(kl_loss_coef=0.1, kl_loss_type="k1"),
}
_loaded: dict[tuple[Path, torch.dtype], tuple[PackedModel, Any]] = {}


def load(path: Path, dtype: torch.dtype = torch.float64) -> tuple[PackedModel, Any]:
    key = path, dtype
    if key not in _loaded:
        _loaded[key] = (
            PackedModel.from_pretrained(path, dtype=dtype),
            load_padded(path, dtype=dtype),
        )
    packed, padded = _loaded[key]
    packed.share_prefix, packed.temperature = True, 1.0
    return packed, padded


def check(
    packed: PackedModel,
    padded: Any,
    config: PolicyLossConfig,
    micro_batches: list[MicroBatch],
    *,
    bound: float = 1e-6,
) -> None:
    samples = [s for micro_batch in micro_batches for s in micro_batch]
    loss = padded_loss(
        padded, samples, replace(config, entropy_coeff=0.0), temperature=packed.temperature
    )
    full_loss = padded_loss(padded, samples, config, temperature=packed.temperature)
    full_loss.backward()
    expected = gradients(padded)
    actual_loss, actual = packed_gradients(packed, micro_batches, config)
    assert actual_loss == pytest.approx(loss.item(), rel=bound, abs=bound)
    assert deviation(actual, expected) < bound


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=15)
@given(
    lengths=groups,
    is_off_policy=st.booleans(),
    share_prefix=st.booleans(),
    temperature=st.sampled_from([1.0, 0.7]),
    is_truncated=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_any_batch_split_in_any_way(
    llama: Path,
    name: str,
    lengths: list[Group],
    is_off_policy: bool,
    share_prefix: bool,
    temperature: float,
    is_truncated: bool,
    seed: int,
) -> None:
    packed, padded = load(llama)
    packed.share_prefix, packed.temperature = share_prefix, temperature
    samples = make_samples(lengths, seed=seed)
    if is_truncated:
        samples = truncated(samples, seed=seed)
    if is_off_policy or CONFIGS[name].kl_loss_coef:
        samples = off_policy(samples, packed, seed=seed)
    check(packed, padded, CONFIGS[name], split(samples, seed=seed))


@pytest.fixture
def samples(qwen2: Path) -> list[Sample]:
    lengths = [Group(12, [20, 1, 9, 33]), Group(40, [7, 7]), Group(3, [25])]
    return off_policy(make_samples(lengths, seed=7), load(qwen2)[0], seed=7)


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "qwen3"])
@pytest.mark.parametrize("name", CONFIGS)
def test_float32(
    folders: dict[str, Path], samples: list[Sample], architecture: str, name: str
) -> None:
    packed, padded = load(folders[architecture], torch.float32)
    samples = off_policy(samples, packed, seed=1)
    check(packed, padded, CONFIGS[name], split(samples, seed=1), bound=2e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_one_micro_batch_or_one_for_each_sample(
    qwen2: Path, samples: list[Sample], name: str
) -> None:
    packed, padded = load(qwen2)
    check(packed, padded, CONFIGS[name], [samples])
    check(packed, padded, CONFIGS[name], [[s] for s in samples])


@pytest.mark.parametrize("name", CONFIGS)
def test_samples_with_nothing_to_learn(qwen2: Path, samples: list[Sample], name: str) -> None:
    """Without KL and entropy their passes are saved; the gradient is that of the batch with them."""
    packed, padded = load(qwen2)
    muted = [replace(s, advantages=np.zeros_like(s.advantages)) for s in samples[::2]]
    masked = [
        replace(s, response_mask=np.zeros(s.response_ids.size, np.bool_)) for s in samples[1:3]
    ]
    check(packed, padded, CONFIGS[name], [[*muted, samples[1]], [*masked, samples[3]], muted])


def test_the_clips_are_active_in_these_samples(qwen2: Path, samples: list[Sample]) -> None:
    packed, _ = load(qwen2)
    (log_probs,) = packed.log_probs([samples])
    old = np.concatenate([s.old_log_probs for s in samples if s.old_log_probs is not None])
    advantages = np.concatenate([s.advantages for s in samples if s.advantages is not None])
    ratio = np.exp(np.concatenate(log_probs) - old)
    assert ((ratio > 1.28) & (advantages > 0)).mean() > 0.05
    assert ((ratio < 0.8) & (advantages < 0)).mean() > 0.05
    assert ((ratio > 1.2) & (advantages < 0)).mean() > 0.05
