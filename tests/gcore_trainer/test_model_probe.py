"""What changes a model's scores without an error: rotary embeddings by length, masks, and what the probe finds."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_config
from trainer_oracles import SIZES, Group, load_padded, make_samples, padded_scores, save_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
)

from gcore_trainer import BatchError, PackedModel, PackedValueModel, Sample, UnsupportedModelError
from gcore_trainer.torch import loading, packed_model as packed_attention

ORIGINAL = 16
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    "original_max_position_embeddings": ORIGINAL,
}
PHI3 = Phi3Config(**SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=ORIGINAL)
_DYNAMIC_SIZES: dict[str, Any] = {**SIZES, "max_position_embeddings": 32}
DYNAMIC = LlamaConfig(
    **_DYNAMIC_SIZES,
    rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
)
SHORT = make_samples([Group(5, [4, 7]), Group(3, [9])], seed=0)
LONG = make_samples([Group(15, [4, 9]), Group(12, [19])], seed=1)


def differences(packed: PackedModel, plain: Any, samples: list[Sample]) -> float:
    """The largest difference of a row's log-probabilities from those of each sample alone."""
    [actual] = packed.log_probs([samples])
    with torch.no_grad():
        expected = [padded_scores(plain, [s]).log_probs[0].numpy() for s in samples]
    return max(float(np.abs(a - e).max()) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize(("samples", "max_length"), [(SHORT, ORIGINAL), (LONG, 31)])
def test_longrope_has_the_factors_of_the_longest_sequence(
    tmp_path: Path, samples: list[Sample], max_length: int
) -> None:
    path = save_model(PHI3, tmp_path, seed=0)
    plain = load_padded(path)
    packed = PackedModel.from_pretrained(path, max_length=max_length)
    assert differences(packed, plain, samples) < 2e-4


@pytest.mark.parametrize("family", [PackedModel, PackedValueModel])
def test_longrope_scores_do_not_depend_on_neighbours(tmp_path: Path, family: Any) -> None:
    packed = family.from_pretrained(save_model(PHI3, tmp_path, seed=0), max_length=31)
    if family is PackedValueModel:
        torch.nn.init.normal_(packed.model.score.weight)
    together = packed.predict([[*SHORT, *LONG]])[0]
    apart = np.concatenate(packed.predict([[s] for s in (*SHORT, *LONG)]))
    np.testing.assert_allclose(together, apart, rtol=1e-4, atol=1e-4)


def test_a_length_that_rotary_embeddings_need_is_refused_where_it_is_missing_or_exceeded(
    tmp_path: Path,
) -> None:
    path = save_model(PHI3, tmp_path, seed=0)
    with pytest.raises(
        UnsupportedModelError, match=r"^max_length is None; expected .* rope_type 'longrope'"
    ):
        PackedModel.from_pretrained(path)
    packed = PackedModel.from_pretrained(path, max_length=ORIGINAL)
    with pytest.raises(
        BatchError, match=r"^a sample has 23 input tokens; expected at most max_length = 16$"
    ):
        packed.log_probs([make_samples([Group(4, [20])], seed=0)])


def test_dynamic_rope_is_computed_up_to_the_length_from_which_it_changes(tmp_path: Path) -> None:
    path = save_model(DYNAMIC, tmp_path, seed=0)
    assert (
        differences(PackedModel.from_pretrained(path, max_length=32), load_padded(path), LONG)
        < 2e-4
    )
    with pytest.raises(
        UnsupportedModelError, match=r"^max_length is 33; expected at most .* = 32 for .* 'dynamic'"
    ):
        PackedModel.from_pretrained(path, max_length=33)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_embeddings_that_do_not_depend_on_length_need_none(
    tmp_path: Path, rope: dict[str, Any]
) -> None:
    path = save_model(
        LlamaConfig(**SIZES, rope_parameters={**rope, "rope_theta": 10000.0}), tmp_path, seed=0
    )
    assert differences(PackedModel.from_pretrained(path), load_padded(path), [*SHORT, *LONG]) < 2e-4


MOE: dict[str, Any] = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MASK_BORNE: dict[str, PreTrainedConfig] = {
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES,
        **MOE,
        num_experts=4,
        use_sliding_window=True,
        sliding_window=8,
        max_window_layers=1,
    ),
    "phimoe": PhimoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
}


@pytest.mark.parametrize("model_type", MASK_BORNE)
def test_a_window_that_only_the_mask_has_is_computed(tmp_path: Path, model_type: str) -> None:
    path = save_model(MASK_BORNE[model_type], tmp_path, seed=0)
    assert differences(PackedModel.from_pretrained(path), load_padded(path), [*SHORT, *LONG]) < 2e-4


def test_a_window_that_the_model_does_not_apply_is_not_applied(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES)
    config.sliding_window = 8
    path = save_model(config, tmp_path, seed=0)
    assert differences(PackedModel.from_pretrained(path), load_padded(path), [*SHORT, *LONG]) < 2e-4


def test_attention_to_later_tokens_is_refused(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {**SIZES, "pad_token_id": 0, "head_dim": 16}
    config = Gemma3TextConfig(**sizes, use_bidirectional_attention=True)
    path = save_model(config, tmp_path, seed=0)
    with pytest.raises(
        UnsupportedModelError,
        match=r"attention mask is made by \w+: packed training computes causal",
    ):
        PackedModel.from_pretrained(path)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("doge", "computes an attention mask of its own"),
        (
            "modernbert-decoder",
            r"scores of 'modernbert-decoder' in a packed row differ from those of transformers by",
        ),
        ("bart", r"scores of 'bart' in a packed row differ"),
        ("bert", r"scores of 'bert' in a packed row differ"),
        ("falcon", r"'falcon' does not load with an attention"),
        ("gptj", r"'gptj' does not load with an attention"),
        ("nemotron", "does not pass the keyword arguments"),
        ("stablelm", "does not pass the keyword arguments"),
        ("moshi", "does not pass the keyword arguments"),
        ("mpt", "0 of the 2 layers of 'mpt' called"),
    ],
)
def test_models_are_refused_when_they_are_loaded(
    tmp_path: Path, model_type: str, reason: str
) -> None:
    path = save_model(tiny_config(model_type), tmp_path, seed=0)
    with pytest.raises(UnsupportedModelError, match=reason):
        PackedModel.from_pretrained(path)


def test_a_critic_of_a_type_without_a_classifier_is_refused(tmp_path: Path) -> None:
    path = save_model(tiny_config("apertus"), tmp_path, seed=0)
    with pytest.raises(
        UnsupportedModelError, match=r"'apertus'; expected one that AutoModel.*Classification has"
    ):
        PackedValueModel.from_pretrained(path)


class MixingMLP(torch.nn.Module):
    """Adds the states of all earlier tokens of the row."""

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        return hidden_BTD.cumsum(1)


def mixing(path: Path, auto_class: Any = AutoModelForCausalLM, **options: Any) -> Any:
    packed_attention.register()
    model: Any = auto_class.from_pretrained(
        path, attn_implementation=packed_attention.ATTENTION_NAME, **options
    )
    model.base_model.layers[1].mlp = MixingMLP()
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_that_mix_the_tokens_of_a_row_are_refused(qwen2: Path, dtype: torch.dtype) -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"'qwen2' in a packed row differ .* by [\d.]+ .*most at token \d+",
    ):
        PackedModel(mixing(qwen2, dtype=dtype))


def test_a_zero_head_does_not_hide_what_a_critic_computes(qwen2: Path) -> None:
    model = mixing(qwen2, AutoModelForSequenceClassification, num_labels=1)
    torch.nn.init.zeros_(model.score.weight)
    with pytest.raises(UnsupportedModelError, match=r"'qwen2' in a packed row differ"):
        PackedValueModel(model)
    assert not model.score.weight.any()


def test_bfloat16_parameters_are_within_their_rounding(folders: dict[str, Path]) -> None:
    for path in folders.values():
        assert PackedModel.from_pretrained(path, dtype=torch.bfloat16).model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("device", "precision", "dtype", "rounds"),
    [
        ("cuda", "high", torch.float32, True),
        ("cuda", "highest", torch.float32, False),
        ("cuda", "highest", torch.bfloat16, True),
        ("cpu", "high", torch.float32, False),
    ],
)
def test_what_a_gpu_rounds_is_no_difference(
    device: str, precision: str, dtype: torch.dtype, rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of its tensor cores have fewer digits, unless they are turned off."""
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    packed = SimpleNamespace(
        model=SimpleNamespace(device=torch.device(device)), compute_dtype=dtype
    )
    assert loading._rounds(packed) == rounds  # pyright: ignore[reportPrivateUsage]  # decides the bound of a comparison


def test_the_comparison_leaves_no_trace(qwen2: Path) -> None:
    packed_attention.register()
    model: Any = AutoModelForCausalLM.from_pretrained(
        qwen2, attn_implementation=packed_attention.ATTENTION_NAME
    )
    model.train()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    random_state = torch.get_rng_state()
    packed = PackedModel(model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == packed_attention.ATTENTION_NAME
    assert packed.num_computed_tokens == 0
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
