"""Log-probabilities and entropies of packed micro-batches against transformers' plain forward, a sample at a time."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file
from trainer_oracles import (
    SIZES,
    Group,
    groups,
    load_padded,
    make_samples,
    padded_scores,
    save_model,
    truncated,
)
from transformers import (
    BloomConfig,
    Lfm2Config,
    MambaConfig,
    PreTrainedConfig,
)

from gcore_trainer import ConfigError, PackedModel, StateError, UnsupportedModelError
from gcore_trainer.torch.sliced_weights import make_model

_loaded: dict[Path, tuple[PackedModel, Any]] = {}


def load(path: Path) -> tuple[PackedModel, Any]:
    if path not in _loaded:
        _loaded[path] = PackedModel.from_pretrained(path), load_padded(path)
    packed, plain = _loaded[path]
    packed.share_prefix, packed.temperature = True, 1.0
    return packed, plain


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "qwen3"])
@settings(max_examples=25)
@given(
    lengths=groups,
    share_prefix=st.booleans(),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    is_truncated=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_scores_are_those_of_a_plain_forward(
    folders: dict[str, Path],
    architecture: str,
    lengths: list[Group],
    share_prefix: bool,
    temperature: float,
    is_truncated: bool,
    seed: int,
) -> None:
    packed, plain = load(folders[architecture])
    packed.share_prefix, packed.temperature = share_prefix, temperature
    samples = make_samples(lengths, seed=seed)
    if is_truncated:
        samples[1:] = truncated(samples[1:], seed=seed)
    with torch.no_grad():
        actual = packed.score(samples)
        expected = [padded_scores(plain, [s], temperature=temperature) for s in samples]
    log_probs = torch.cat([e.log_probs[0] for e in expected])
    torch.testing.assert_close(actual.log_probs, log_probs, rtol=1e-5, atol=1e-5)
    entropies = torch.cat([e.entropies[0] for e in expected])
    torch.testing.assert_close(actual.entropies, entropies, rtol=1e-5, atol=1e-5)
    for array, sample, e in zip(packed.log_probs([samples])[0], samples, expected, strict=True):
        assert array.dtype == np.float32
        np.testing.assert_allclose(
            array, e.log_probs[0, : sample.response_ids.size], rtol=1e-5, atol=1e-5
        )


def test_distributions_of_the_tiny_models_are_not_flat(folders: dict[str, Path]) -> None:
    """What makes the comparisons above and in the other files say something."""
    samples = make_samples([Group(8, [20] * 8)], seed=0)
    for path in folders.values():
        with torch.no_grad():
            entropies = load(path)[0].score(samples).entropies
        assert 0.5 < entropies.mean() < 0.85 * np.log(96)
        assert entropies.std() > 0.1


def test_a_prompt_shared_by_the_batch_saves_its_tokens(qwen2: Path) -> None:
    samples = make_samples([Group(30, [10, 10, 10])], seed=0)
    packed = PackedModel.from_pretrained(qwen2)
    unshared = PackedModel.from_pretrained(qwen2, share_prefix=False)
    with torch.no_grad():
        packed.score(samples)
        unshared.score(samples)
        assert packed.num_computed_tokens == 30 + 3 * 9
        assert unshared.num_computed_tokens == 3 * 39


def test_micro_batches_are_scored_one_by_one(qwen2: Path) -> None:
    a, b, c = make_samples([Group(5, [4, 9]), Group(3, [2])], seed=0)
    packed, _ = load(qwen2)
    apart, together = packed.log_probs([[a], [b, c]]), packed.log_probs([[a, b, c]])
    assert [len(x) for x in apart] == [1, 2]
    for x, y in zip([*apart[0], *apart[1]], together[0], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_out_of_bounds_is_refused(qwen2: Path, temperature: float) -> None:
    with pytest.raises(ConfigError, match=r"^temperature is "):
        PackedModel.from_pretrained(qwen2, temperature=temperature)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "shape",
            r"the weights in .* do not fit its config.json: model.norm.weight has shape \[7\]; expected \[\d+\]",
        ),
        ("nan", r"model.norm.weight of 'qwen2' holds nan or infinity; expected finite weights"),
        ("missing", r"lack 1 of the model's tensors, such as model.norm.weight"),
        ("config", r"the model in .* does not load \(ZeroDivisionError: "),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    qwen2: Path, tmp_path: Path, change: str, message: str
) -> None:
    folder = shutil.copytree(qwen2, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    norm = weights.pop("model.norm.weight")
    match change:
        case "shape":
            weights["model.norm.weight"] = torch.ones(7)
        case "nan":
            weights["model.norm.weight"] = norm * torch.nan
        case "config":
            settings = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(settings | {"num_attention_heads": 0}))
        case _:
            pass
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StateError, match=message):
        PackedModel.from_pretrained(folder)


def test_a_model_with_ordinary_attention_is_refused(qwen2: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'eager'; expected 'gcore_packed'"):
        PackedModel(load_padded(qwen2))


def test_weights_of_more_layers_than_the_configuration_has_are_refused(
    qwen2: Path, tmp_path: Path
) -> None:
    """transformers leaves them out, without an error: the model would be another one."""
    path = tmp_path / "more"
    shutil.copytree(qwen2, path)
    config = json.loads((path / "config.json").read_text())
    last = config["num_hidden_layers"] - 1
    config |= {"num_hidden_layers": last, "layer_types": None, "max_window_layers": last}
    (path / "config.json").write_text(json.dumps(config))
    message = rf"layers that config\.json does not have, such as model\.layers\.{last}\..*; expected the configuration"
    with pytest.raises(StateError, match=message):
        PackedModel.from_pretrained(path)
    with pytest.raises(StateError, match=message):
        make_model(
            PackedModel,
            path,
            attention="gcore_packed",
            dtype=torch.float32,
            device=torch.device("cpu"),
        )


UNSUPPORTED: dict[str, tuple[PreTrainedConfig, str]] = {
    "alibi": (
        BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=96),
        "0 of the 2 layers of 'bloom'",
    ),
    "state space": (
        MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=96),
        "linear_attention",
    ),
    "short convolution": (Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]), "conv"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_what_packed_attention_does_not_compute_is_refused(tmp_path: Path, kind: str) -> None:
    config, message = UNSUPPORTED[kind]
    path = save_model(config, tmp_path, seed=0)
    with pytest.raises(UnsupportedModelError, match=message):
        PackedModel.from_pretrained(path).log_probs([make_samples([Group(4, [3, 5])], seed=0)])
