"""Sliding windows, soft caps, attention sinks and linear attention of packed rows, against transformers and against
attention written out for one sequence.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from trainer_oracles import (
    SIZES,
    Group,
    deviation,
    gradients,
    groups,
    load_padded,
    make_samples,
    padded_scores,
    save_model,
)
from transformers import (
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    GraniteConfig,
    HyperCLOVAXConfig,
    MistralConfig,
    MixtralConfig,
    NanoChatConfig,
    Olmo3Config,
    OlmoHybridConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from gcore_trainer import PackedModel, UnsupportedModelError
from gcore_trainer.context_parallel.groups import ContextParallel
from gcore_trainer.packing import block_attention, tiles
from gcore_trainer.packing.block_attention import AttentionKind
from gcore_trainer.packing.layout import pack
from gcore_trainer.packing.linear_attention import mix
from gcore_trainer.packing.row import PackedPlan

WINDOW = 8
LAYERS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 4}
FINE_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "cohere": CohereConfig(**SIZES, logit_scale=0.3),
    "cohere2": Cohere2Config(**SIZES, **LAYERS, logit_scale=0.3),
    "gemma2": Gemma2Config(
        **SIZES,
        **LAYERS,
        head_dim=16,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        query_pre_attn_scalar=8,
    ),
    "gemma3": Gemma3TextConfig(**SIZES, **LAYERS, head_dim=16, final_logit_softcapping=4.0),
    "gpt_oss": GptOssConfig(**SIZES, **LAYERS, **EXPERTS, head_dim=16),
    "granite": GraniteConfig(**SIZES, logits_scaling=2.5, attention_multiplier=0.3),
    "hyperclovax": HyperCLOVAXConfig(**SIZES, logits_scaling=0.4),
    "mistral": MistralConfig(**SIZES, sliding_window=WINDOW),
    "mixtral": MixtralConfig(**SIZES, **EXPERTS, sliding_window=WINDOW),
    "nanochat": NanoChatConfig(**SIZES, final_logit_softcapping=3.0),
    "olmo3": Olmo3Config(**SIZES, **LAYERS),
    "phimoe": PhimoeConfig(**SIZES, **EXPERTS, sliding_window=WINDOW),
    "qwen2": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES,
        **FINE_EXPERTS,
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
    ),
    "qwen3_5": Qwen3_5TextConfig(**SIZES, **LINEAR, head_dim=16),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**SIZES, **LINEAR, **FINE_EXPERTS, head_dim=16),
    "qwen3_next": Qwen3NextConfig(**SIZES, **LINEAR, **FINE_EXPERTS, head_dim=16),
    "olmo_hybrid": OlmoHybridConfig(**SIZES, **LINEAR),
    "qwen3": Qwen3Config(
        **SIZES, head_dim=24, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=0
    ),
}

MIXED = [Group(3, [2]), Group(7, [1, 2, 3]), Group(20, [30, 1, 9, 12]), Group(1, [40, 8])]
"""Sequences shorter than the window, as long, and longer; prompts of which some are shared."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(ARCHITECTURES[request.param], tmp_path_factory.mktemp(request.param), seed=0)


@pytest.mark.parametrize("share_prefix", [True, False], ids=["shared", "apart"])
def test_scores_and_gradients_are_those_of_transformers(folder: Path, share_prefix: bool) -> None:
    packed = PackedModel.from_pretrained(folder, share_prefix=share_prefix, temperature=0.8)
    plain = load_padded(folder).train(packed.model.training)
    samples = make_samples(MIXED, seed=0)
    scores = packed.score(samples, entropy_grad=True)
    expected = [padded_scores(plain, [s], temperature=0.8) for s in samples]
    log_probs = torch.cat([e.log_probs[0] for e in expected])
    entropies = torch.cat([e.entropies[0] for e in expected])
    torch.testing.assert_close(scores.log_probs, log_probs, rtol=2e-5, atol=5e-5)
    torch.testing.assert_close(scores.entropies, entropies, rtol=2e-5, atol=5e-5)

    weights = torch.randn(2, log_probs.numel(), generator=torch.Generator().manual_seed(1))
    for model, own_scores in (
        (packed.model, (scores.log_probs, scores.entropies)),
        (plain, (log_probs, entropies)),
    ):
        model.zero_grad()
        (weights * torch.stack(own_scores)).sum().backward()
    found, wanted = gradients(packed.model), gradients(plain)
    assert deviation(found, wanted) < 2e-5
    for name, gradient in wanted.items():  # sinks and norms are small next to the largest gradient
        assert deviation({name: found[name]}, {name: gradient}) < 1e-4, name


def test_the_settings_above_change_the_scores(folder: Path, request: pytest.FixtureRequest) -> None:
    """Without its window, caps, sinks, scale or linear attention, each model scores the same samples differently."""
    plain, neutral = load_padded(folder), load_padded(folder)
    neutral.config.final_logit_softcapping = None
    neutral.config.logits_scaling = neutral.logit_scale = 1.0
    neutral.config.sliding_window = 1000
    for module in neutral.modules():
        if isinstance(sinks := getattr(module, "sinks", None), torch.nn.Parameter):
            sinks.data.fill_(-100.0)
        if hasattr(module, "attn_logit_softcapping"):
            module.attn_logit_softcapping = None
        if hasattr(module, "linear_attn"):
            module.linear_attn.forward = lambda hidden_states, **_: hidden_states
    samples = make_samples(MIXED, seed=0)
    with torch.no_grad():
        assert (
            padded_scores(plain, samples).log_probs - padded_scores(neutral, samples).log_probs
        ).abs().max() > 0.01


def attended_apart(
    rows: list[torch.Tensor],
    sinks_H: torch.Tensor | None,
    places: torch.Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Dense attention [L, H, D] of one sequence, whose tokens are at ``places`` of the row."""
    q_HLD, k_HLD, v_HLD = (x[0][:, places] for x in rows)
    k_HLD, v_HLD = (
        x.repeat_interleave(q_HLD.shape[0] // x.shape[0], dim=0) for x in (k_HLD, v_HLD)
    )
    scores_HLL = q_HLD @ k_HLD.mT * scale
    if softcap is not None:
        scores_HLL = softcap * (scores_HLL / softcap).tanh()
    distance_LL = torch.arange(len(places))[:, None] - torch.arange(len(places))
    is_hidden_LL = (distance_LL < 0) | (distance_LL >= (window or len(places)))
    scores_HLL = scores_HLL.masked_fill(is_hidden_LL, -torch.inf)
    if sinks_H is not None:
        scores_HLL = torch.cat(
            [scores_HLL, sinks_H[:, None, None].expand(-1, len(places), 1)], dim=-1
        )
    return (scores_HLL.softmax(-1)[..., : len(places)] @ v_HLD).transpose(0, 1)


@settings(max_examples=60)
@given(
    lengths=groups,
    share_prefix=st.booleans(),
    window=st.sampled_from([None, 1, 2, 3, 5, 16, 17, 33, 80]),
    softcap=st.sampled_from([None, 0.5, 4.0]),
    has_sinks=st.booleans(),
    num_padded=st.sampled_from([0, 16, 64]),
    num_scores=st.sampled_from([1, 1000, 1 << 26]),
    scale=st.sampled_from([None, 0.9]),
)
def test_a_layer_is_dense_attention_of_each_sequence(
    lengths: list[Group],
    share_prefix: bool,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    num_padded: int,
    num_scores: int,
    scale: float | None,
) -> None:
    samples = make_samples(lengths, seed=0)
    batch = pack(samples, share_prefix=share_prefix)
    generator = torch.Generator().manual_seed(len(samples))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    rows = [random(1, heads, batch.input_ids.size, 6) for heads in (4, 2, 2)]
    sinks_H = random(4) if has_sinks else None
    places = [torch.from_numpy(x) for x in batch.input_places(samples)]
    grads = [random(len(x), 4, 6).detach() for x in places]
    inputs = [*rows, *([] if sinks_H is None else [sinks_H])]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "NUM_PADDED", num_padded)
        patch.setattr(block_attention, "_NUM_PLAIN_SCORES", num_scores)
        plan = PackedPlan(batch, device=torch.device("cpu"))
        layer = AttentionKind(scale=scale, sliding_window=window, softcap=softcap, sinks=sinks_H)
        out_THD = plan.attend(rows[0], rows[1], rows[2], layer)[0]
        loss = torch.cat(
            [(out_THD[x] * grad).flatten() for x, grad in zip(places, grads, strict=True)]
        ).sum()
        actual = torch.autograd.grad(loss, inputs)

    kind: Any = {"scale": 6**-0.5 if scale is None else scale, "window": window, "softcap": softcap}
    expected = [attended_apart(rows, sinks_H, x, **kind) for x in places]
    for x, out in zip(places, expected, strict=True):
        assert (out_THD[x] - out).abs().max() < 1e-10
    true_loss = torch.cat(
        [(out * grad).flatten() for out, grad in zip(expected, grads, strict=True)]
    ).sum()
    wanted = torch.autograd.grad(true_loss, inputs)
    for gradient, true in zip(actual, wanted, strict=True):
        assert (gradient - true).abs().max() < 1e-10 * max(1.0, true.abs().max().item())


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss", "qwen3", "qwen3_5"])
def test_mixed_precision_and_checkpointing(architecture: str, tmp_path: Path) -> None:
    """bfloat16 next to float32 weights, layers computed again: close to float32, and with gradients everywhere."""
    path = save_model(ARCHITECTURES[architecture], tmp_path, seed=0)
    exact = PackedModel.from_pretrained(path)
    mixed = PackedModel.from_pretrained(
        path, compute_dtype=torch.bfloat16, gradient_checkpointing=True
    )
    samples = make_samples(MIXED, seed=0)
    scores = []
    for packed in (exact, mixed):
        scores.append(packed.score(samples).log_probs)
        scores[-1].mean().backward()
    assert (scores[0] - scores[1]).abs().mean() < 0.1
    wanted, found = gradients(exact.model), gradients(mixed.model)
    for name, gradient in wanted.items():
        assert (
            torch.nn.functional.cosine_similarity(found[name].flatten(), gradient.flatten(), dim=0)
            > 0.8
        ), name


@given(lengths=groups, share_prefix=st.booleans())
def test_a_recurrence_starts_again_with_each_sequence(
    lengths: list[Group], share_prefix: bool
) -> None:
    samples = make_samples(lengths, seed=0)
    batch = pack(samples, share_prefix=share_prefix)
    hidden_1TD = torch.randn(1, batch.input_ids.size, 3, dtype=torch.float64).requires_grad_()

    def mixer(hidden_SLD: torch.Tensor) -> torch.Tensor:
        return hidden_SLD.cumsum(1) * hidden_SLD.exp()

    plan = PackedPlan(batch, device=torch.device("cpu"))
    mixed_1TD = mix(plan, hidden_1TD, mixer)
    assert plan.num_calls == 1
    places = [torch.from_numpy(x) for x in batch.input_places(samples)]
    actual = torch.cat([mixed_1TD[0, x] for x in places])
    expected = torch.cat([mixer(hidden_1TD[:, x])[0] for x in places])
    assert (actual - expected).abs().max() < 1e-12
    weights = torch.randn_like(expected)
    [found], [wanted] = (
        torch.autograd.grad((x * weights).sum(), hidden_1TD) for x in (actual, expected)
    )
    assert (found - wanted).abs().max() < 1e-10


def test_ranks_do_not_divide_linear_attention(tmp_path: Path) -> None:
    packed = PackedModel.from_pretrained(save_model(ARCHITECTURES["qwen3_next"], tmp_path, seed=0))
    with pytest.raises(
        UnsupportedModelError, match=r"'qwen3_next' has linear attention, and 2 ranks are to divide"
    ):
        packed.divide_tokens(ContextParallel(ring_size=2))


def test_logits_changed_in_an_unknown_way_are_refused(folders: dict[str, Path]) -> None:
    model = PackedModel.from_pretrained(folders["llama"]).model
    for name, value in (
        ("final_logit_softcapping", 30.0),
        ("logits_scaling", 2.0),
        ("logit_scale", 2.0),
    ):
        setattr(model.config, name, value)
        with pytest.raises(
            UnsupportedModelError, match=rf"^{name} is {value}; expected .* for model type 'llama'"
        ):
            PackedModel(model)
        setattr(model.config, name, None)
