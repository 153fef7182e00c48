"""`MegatronTrainer` reads Hugging Face folders, scores as transformers does, and gives the same weights back."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron_oracles import (
    CP,
    EP,
    GROUPS,
    PP,
    SP,
    TP,
    ULYSSES,
    VPP,
    data_parallel_rank,
    data_parallel_size,
    save_megatron_model,
)
from rank_pool import RankServer
from trainer_oracles import load_padded, make_samples, padded_scores, split, truncated
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@pytest.mark.parametrize(
    ("name", "size", "layout"),
    [
        ("llama", 1, {}),
        ("llama", 2, {TP: 2}),
        # More ranks than key-value heads.
        ("llama", 4, {TP: 4}),
        ("qwen2", 4, {TP: 4, SP: True}),
        ("qwen2", 2, {PP: 2}),
        ("qwen2", 4, {TP: 2, PP: 2, SP: True}),
        ("qwen3", 4, {TP: 2, PP: 2, VPP: 2}),
        ("qwen3_tied", 4, {TP: 2}),
        ("qwen3_tied", 4, {CP: 2, TP: 2, SP: True}),
        ("llama", 4, {CP: 4, ULYSSES: 2}),
        ("qwen3_moe", 2, {EP: 2}),
        ("qwen3_moe_raw", 4, {EP: 2, TP: 2, PP: 2, SP: True}),
    ],
    ids=str,
)
def test_log_probs_and_weights_are_those_of_transformers(
    rank_server: RankServer, root: Path, name: str, size: int, layout: dict[str, Any]
) -> None:
    path = save_megatron_model(name, root)
    samples = make_samples(GROUPS, seed=0)
    # Of others all tokens were drawn from the whole vocabulary.
    samples[::2] = truncated(samples[::2], seed=0)
    micro_batches = split(samples, seed=0)
    pool = rank_server.shared(size)
    results = pool.run(
        "megatron_predicts", str(path), layout, {"temperature": 1.4}, micro_batches, size=size
    )
    with torch.no_grad():
        expected = [
            padded_scores(load_padded(path), m, temperature=0.7).log_probs.numpy()
            for m in micro_batches
        ]
    num_replicas = data_parallel_size(size, layout)
    for rank, (log_probs, _) in enumerate(results):
        own = expected[data_parallel_rank(rank, size, layout) :: num_replicas]
        for rows, expected_rows in zip(log_probs, own, strict=True):
            for row, expected_row in zip(rows, expected_rows, strict=True):
                np.testing.assert_allclose(row, expected_row[: row.size], rtol=0, atol=1e-4)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    weights = results[0][1]
    assert weights.keys() == dict(model.named_parameters()).keys()
    for key, parameter in model.named_parameters():
        assert torch.equal(weights[key], parameter), key


@pytest.mark.parametrize(
    ("name", "layout"), [("qwen2", {TP: 2, PP: 2}), ("qwen3_moe", {EP: 2, PP: 2})], ids=str
)
def test_transformers_loads_what_is_saved(
    rank_server: RankServer, root: Path, tmp_path: Path, name: str, layout: dict[str, Any]
) -> None:
    path = save_megatron_model(name, root)
    rank_server.shared().run(
        "megatron_saves", str(path), layout, {}, str(tmp_path / "saved"), size=4
    )
    # Each rank has written one.
    assert len(list((tmp_path / "saved").glob("model-*-of-00004.safetensors"))) == 4
    expected = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    model, info = loaded
    assert not any(info.values())
    assert type(model) is type(expected)
    for key, parameter in expected.named_parameters():
        assert torch.equal(model.get_parameter(key), parameter), key


@pytest.mark.parametrize("layout", [{TP: 2, PP: 2, SP: True}, {CP: 2, PP: 2}], ids=str)
def test_a_critic_learns_from_zero_and_is_saved_as_a_classifier(
    rank_server: RankServer, root: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    path = save_megatron_model("qwen2", root)
    rng = np.random.default_rng(0)
    samples = [
        replace(s, returns=rng.normal(1, 0.1, s.response_ids.size).astype(np.float32))
        for s in make_samples(GROUPS, seed=0)
    ]
    saved = tmp_path / "saved"
    results = rank_server.shared().run(
        "megatron_critic", str(path), layout, samples, str(saved), size=4
    )
    before, after, metrics = results[0]
    assert not any(row.any() for row in before)
    assert metrics["loss"] < 1.0
    model: Any = AutoModelForSequenceClassification.from_pretrained(saved)
    assert model.config.num_labels == 1
    with torch.no_grad():
        for sample, row in zip(samples, after, strict=True):
            ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]))
            values = model.score(model.model(input_ids=ids[None]).last_hidden_state)[0, :, 0]
            expected = values[sample.prompt_ids.size - 1 : -1].numpy()
            np.testing.assert_allclose(row, expected, rtol=0, atol=1e-4)
