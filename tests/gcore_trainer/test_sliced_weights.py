"""Parameters that are read by slices against those of whole models: the same to the bit, in less memory."""

import json
import logging
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_pool import RankServer
from safetensors.torch import load_file
from test_fsdp import GROUPS, ULYSSES, dealt, steps_of, without_tokens
from tiny_models import tiny_config
from tiny_vision_model import save_vision_model
from trainer_oracles import Group, make_samples, save_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen2Config,
    Qwen3MoeConfig,
)

from gcore_trainer import (
    LoRAConfig,
    Objective,
    PackedModel,
    PackedValueModel,
    ParallelConfig,
    PolicyLossConfig,
    PolicyObjective,
    Sample,
    SFTObjective,
    UnsupportedModelError,
    ValueLossConfig,
    ValueObjective,
)

POLICY = PolicyObjective(PolicyLossConfig(entropy_coeff=0.01))
VALUE = ValueObjective(ValueLossConfig())
BF16: dict[str, Any] = {"compute_dtype": torch.bfloat16}
CHECKPOINTED: dict[str, Any] = {"gradient_checkpointing": True, "activation_offload": True}


def compare(
    server: RankServer,
    path: Path,
    objective: Objective[Any],
    steps: list[list[Sample]],
    parallel: ParallelConfig | None = None,
    **options: Any,
) -> list[str]:
    """Check both ways of loading on two ranks, or on two that share parameters and two with copies.

    Return what the first rank logged.
    """
    parallel = parallel or ParallelConfig()
    size = 2 * parallel.fsdp_size or 2
    parts = [
        dealt(samples, parallel.data_parallel_size(size), seed=i) for i, samples in enumerate(steps)
    ]
    arguments = (str(path), objective, parallel, parts, options)
    outcomes = server.shared(size).run("compare", *arguments, size=size)
    for different, (whole, sliced), _ in outcomes:
        assert different == []
        for own, expected in zip(sliced, whole, strict=True):
            assert without_tokens(own) == pytest.approx(
                without_tokens(expected), rel=1e-6, abs=1e-6
            )
    return outcomes[0][2]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "llama", "qwen3"])
def test_shards_are_those_of_a_whole_model(
    rank_server: RankServer, folders: dict[str, Path], family: str
) -> None:
    """In bfloat16; the other tests have float32."""
    path, options = folders[family], BF16 | CHECKPOINTED
    assert compare(rank_server, path, POLICY, steps_of(path, 2), **options) == []


@pytest.mark.slow
def test_copies_of_shards_are_those_of_a_whole_model(rank_server: RankServer, qwen2: Path) -> None:
    assert (
        compare(rank_server, qwen2, POLICY, steps_of(qwen2, 2), ParallelConfig(fsdp_size=2)) == []
    )


@pytest.mark.slow
def test_ranks_that_divide_tokens_check_the_model_undivided(
    rank_server: RankServer, llama: Path
) -> None:
    assert compare(rank_server, llama, POLICY, steps_of(llama, 2), ULYSSES) == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, BF16], ids=["float32", "bf16"])
def test_adapters_start_as_those_of_a_whole_model(
    rank_server: RankServer, qwen2: Path, options: dict[str, Any]
) -> None:
    assert (
        compare(rank_server, qwen2, POLICY, steps_of(qwen2, 2), lora=LoRAConfig(rank=3), **options)
        == []
    )


def with_targets(samples: list[Sample], seed: int) -> list[Sample]:
    rng = np.random.default_rng(seed)
    numbers = [rng.normal(0, 1, (2, s.response_ids.size)).astype(np.float32) for s in samples]
    return [replace(s, values=v, returns=r) for s, (v, r) in zip(samples, numbers, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("is_trained", [False, True], ids=["new-head", "own-head"])
def test_value_heads_too(
    rank_server: RankServer, llama: Path, tmp_path: Path, is_trained: bool
) -> None:
    path = llama
    if is_trained:
        model: Any = AutoModelForSequenceClassification.from_pretrained(llama, num_labels=1)
        model.save_pretrained(path := tmp_path / "critic")
    steps = [with_targets(make_samples(GROUPS, seed=i), i) for i in range(2)]
    assert compare(rank_server, path, VALUE, steps) == []


@pytest.mark.slow
@pytest.mark.parametrize("tie", [False, True])
def test_vision_models_too(rank_server: RankServer, tmp_path: Path, tie: bool) -> None:
    path = save_vision_model(tmp_path / "model", tie=tie)
    steps = [make_samples([Group(9, [5, 3]), Group(4, [7])], seed=i) for i in range(2)]
    steps = [
        [replace(s, prompt_ids=s.prompt_ids % 32, response_ids=s.response_ids % 32) for s in own]
        for own in steps
    ]
    assert compare(rank_server, path, SFTObjective(), steps) == []


@pytest.mark.slow
def test_frozen_models_too(rank_server: RankServer, qwen2: Path) -> None:
    for whole, sliced in rank_server.shared(2).run(
        "frozen_scores", str(qwen2), [make_samples(GROUPS, seed=0)], size=2
    ):
        for own, expected in zip(sliced[0], whole[0], strict=True):
            np.testing.assert_allclose(own, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_fused_experts_are_read_one_by_one(
    rank_server: RankServer, tmp_path: Path, model_type: str
) -> None:
    path = save_model(tiny_config(model_type), tmp_path, seed=0)
    assert compare(rank_server, path, POLICY, steps_of(path, 2)) == []


@pytest.mark.slow
def test_a_rank_needs_its_experts_and_little_more(rank_server: RankServer, tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=32,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    size_bytes = 4 * model.num_parameters()
    model.bfloat16().save_pretrained(tmp_path)
    del model
    with rank_server.pool(2) as ranks:
        peaks = {s: ranks.run("peak_bytes", str(tmp_path), s, size=2) for s in (True, False)}
    print(f"{size_bytes / 2**20:.0f} MiB in float32, peaks {peaks}")
    assert max(peaks[True]) < 0.75 * size_bytes
    assert min(peaks[False]) > 0.9 * size_bytes


@pytest.mark.slow
def test_a_rank_needs_its_shards_and_little_more(rank_server: RankServer, tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=40,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    size_bytes = 4 * model.num_parameters()
    model.bfloat16().save_pretrained(tmp_path)
    assert size_bytes > 90e6
    expected = {
        name: tensor.clone()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    del model
    export, file_bytes = tmp_path / "export", 4 << 20
    # Processes of its own: where others' tests have run, allocations take what they left, and freed memory stays.
    with rank_server.pool(2) as ranks:
        peaks = {s: ranks.run("peak_bytes", str(tmp_path), s, size=2) for s in (True, False)}
        exports = ranks.run("peak_bytes_of_export", str(tmp_path), str(export), file_bytes, size=2)
    assert max(peaks[True]) < 0.75 * size_bytes
    assert min(peaks[False]) > 0.9 * size_bytes
    for peak, dtypes, exported_bytes in exports:
        # bfloat16, not the originals in float32; a file's tensors and a layer.
        assert (dtypes, exported_bytes) == ({torch.bfloat16}, size_bytes // 2)
        assert peak < file_bytes + 8e6 < 0.25 * exported_bytes
    assert len(list(export.glob("model-*-of-*.safetensors"))) > 9
    loaded = AutoModelForCausalLM.from_pretrained(export).state_dict()
    torch.testing.assert_close({name: loaded[name] for name in expected}, expected, rtol=0, atol=0)


@pytest.mark.slow
def test_ranks_wait_on_the_host_while_one_writes(
    rank_server: RankServer, qwen2: Path, tmp_path: Path
) -> None:
    """NCCL would end a collective of the weights that takes too long."""
    file_bytes = sum(file.stat().st_size for file in qwen2.glob("*.safetensors")) // 6
    arguments = (str(qwen2), str(tmp_path), file_bytes)
    _, other = rank_server.shared(2).run("waits_in_a_save", *arguments, size=2)
    num_files = len(list(tmp_path.glob("model-*.safetensors")))
    assert num_files >= 4
    # Both write a file at a time.
    assert other.get("gather", 0) > 10 * (num_files // 2)
    assert other.get("gather_full_tensor", 0) < 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "file_bytes", "size"),
    [
        ("qwen2", 1 << 30, 2),
        ("qwen2", 1 << 14, 4),
        ("qwen3_moe", 1 << 30, 4),
        ("gemma3_text", 1 << 14, 2),
    ],
)
def test_every_rank_writes_its_share(
    rank_server: RankServer, tmp_path: Path, model_type: str, file_bytes: int, size: int
) -> None:
    """And transformers loads from all what it loads from the original folder."""
    path = save_model(tiny_config(model_type), tmp_path / "model", seed=0)
    export = tmp_path / "runs" / "export"
    arguments = (str(path), str(export), file_bytes, {}, None)
    written = rank_server.shared(size).run("save_by_shares", *arguments, size=size)
    files = sorted(export.glob("*.safetensors"))
    file_of = json.loads((export / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(set(file_of.values())) == [file.name for file in files]
    assert (len(files) == size) == (file_bytes > 1 << 20)
    assert sorted(chain.from_iterable(written)) == sorted(file_of)
    sizes = [0] * size
    for file in files:
        tensors = load_file(file)
        [writer] = {rank for rank in range(size) if not tensors.keys().isdisjoint(written[rank])}
        sizes[writer] += sum(tensor.nbytes for tensor in tensors.values())
    largest = max(t.nbytes for file in files for t in load_file(file).values())
    assert max(sizes) - min(sizes) <= 2 * largest
    assert list(export.parent.iterdir()) == [export]
    saved, original = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (export, path)
    )
    torch.testing.assert_close(saved, original, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_write_leaves_no_folder(
    rank_server: RankServer, qwen2: Path, tmp_path: Path, failing: int
) -> None:
    """All ranks raise its error; a folder that was there is as it was."""
    export = tmp_path / "export"
    ranks = rank_server.shared(2)
    arguments = (str(qwen2), str(export), 1 << 30, {}, failing)
    reasons = ranks.errors("save_by_shares", *arguments, size=2)
    assert reasons[failing] == "OSError: [Errno 28] No space left on device"
    assert reasons[1 - failing] == f"OSError: rank {failing}: [Errno 28] No space left on device"
    assert list(tmp_path.iterdir()) == []
    ranks.run("save_by_shares", str(qwen2), str(export), 1 << 30, {}, None, size=2)
    before = {file.name: file.read_bytes() for file in export.iterdir()}
    ranks.errors("save_by_shares", *arguments, size=2)
    assert {file.name: file.read_bytes() for file in export.iterdir()} == before


@pytest.mark.parametrize(
    "model_type", ["gemma3_text", "deepseek_v3", "mixtral", "gpt_oss", "phi3", "qwen3_5_text"]
)
def test_one_process_has_the_same_tensors(tmp_path: Path, model_type: str) -> None:
    """What a process with CUDA does, on the CPU."""
    path = save_model(tiny_config(model_type), tmp_path, seed=0)
    whole = PackedModel.from_pretrained(path, max_length=64, **BF16)
    sliced = PackedModel.from_pretrained(path, max_length=64, sharded=True, **BF16)
    sliced.load_weights()
    for named in ("named_parameters", "named_buffers"):
        torch.testing.assert_close(
            dict(getattr(sliced.model, named)()),
            dict(getattr(whole.model, named)()),
            rtol=0,
            atol=0,
        )
    samples = make_samples(GROUPS, seed=0)
    for own, expected in zip(sliced.predict([samples]), whole.predict([samples]), strict=True):
        np.testing.assert_array_equal(own, expected)


def test_a_model_that_cannot_be_packed_is_refused_once_it_has_weights(tmp_path: Path) -> None:
    """Of a model whose passes differ from transformers', in float32 as a whole model's."""
    path = save_model(tiny_config("qwen2"), tmp_path, seed=0)
    packed = PackedModel.from_pretrained(path, sharded=True, **BF16)
    layer: Any = packed.layers()[0]
    scale = layer.self_attn.scaling
    forward = packed.model.model.forward

    def wrong(**inputs: Any) -> Any:
        layer.self_attn.scaling = 1.05 * scale if "packed" in inputs else scale
        return forward(**inputs)

    packed.model.model.forward = wrong
    with pytest.raises(UnsupportedModelError, match=r"^scores of 'qwen2' in a packed row differ"):
        packed.load_weights()


def test_folders_without_safetensors_are_loaded_whole(
    qwen2: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(qwen2)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with caplog.at_level(logging.WARNING):
        packed = PackedValueModel.from_pretrained(tmp_path, sharded=True)
    assert caplog.messages[0] == (
        f"{tmp_path} is loaded whole by each process, in torch.float32: there is neither model.safetensors nor an "
        "index of its parts"
    )
    assert torch.equal(packed.model.model.embed_tokens.weight, model.model.embed_tokens.weight)
