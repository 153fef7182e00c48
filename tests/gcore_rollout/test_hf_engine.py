"""What the `hf` engine promises beyond the rest: a request's result does not depend on what else is in the batch."""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_oracles import (
    EOS_TOKEN_IDS,
    TinyModel,
    assert_equal,
    collect,
    errors,
    in_parts,
    make_request,
    repeats,
    tensor_bytes,
)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Cohere2Config,
    DogeConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    NemotronConfig,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from gcore_rollout import (
    EngineModelError,
    HFEngine,
    RepetitionDetection,
    Request,
    RequestError,
    RolloutError,
    SamplingParams,
)
from gcore_rollout.engines.hf import decoding, plain_attention
from gcore_rollout.engines.queueing import StopStrings
from gcore_rollout.engines.repetition import extend_runs, is_repetitive, runs_at_end

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": None,
}


def _save(config: PreTrainedConfig, path: Path) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(path)
    return model


def _crowd() -> list[Request]:
    return [
        make_request(
            f"c{i}", 1 + 13 * i, n=1 + i % 3, max_tokens=5 + 7 * i, temperature=0.5 * (i % 4)
        )
        for i in range(9)
    ]


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 64])
async def test_result_does_not_depend_on_the_batch(tied: TinyModel, max_num_seqs: int) -> None:
    """Same tokens; log-probs up to rounding."""
    request = make_request("r", 21, n=3, max_tokens=40, temperature=0.8, seed=5)
    alone = await collect(HFEngine.from_pretrained(tied.path), request)
    crowd = _crowd()
    found = await collect(
        HFEngine.from_pretrained(tied.path, max_num_seqs=max_num_seqs),
        *crowd[:4],
        request,
        *crowd[4:],
    )
    for key, expected in alone.items():
        assert found[key].token_ids.tolist() == expected.token_ids.tolist()
        assert found[key].finish_reason == expected.finish_reason
        np.testing.assert_allclose(found[key].log_probs, expected.log_probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("max_num_seqs", "num_tokens"), [(3, 30), (64, 50)])
async def test_interrupted_equals_uninterrupted(
    tied: TinyModel, max_num_seqs: int, num_tokens: int
) -> None:
    """Sampled or greedy, with repetitions that straddle an interruption: the same tokens and ends."""
    engine = HFEngine.from_pretrained(tied.path, max_num_seqs=max_num_seqs)
    crowd = _crowd()
    detection = RepetitionDetection(max_pattern_size=6, min_count=2)
    guarded = [
        replace(r, sampling=replace(r.sampling, repetition_detection=detection)) for r in crowd[::2]
    ]
    requests = [*guarded, *crowd[1::2]]
    whole = await collect(engine, *requests)
    assert {c.finish_reason for c in whole.values()} == {"stop", "length", "repetition"}
    found, num_aborts = await in_parts(engine, *requests, num_tokens=num_tokens)
    assert num_aborts > 2
    assert found.keys() == whole.keys()
    for key, expected in whole.items():
        assert_equal(found[key], expected, tolerance=1e-5)


@pytest.mark.parametrize("num_letters", [1, 2, 5])
def test_runs_find_repetitions(num_letters: int) -> None:
    """Token by token for several samples at once, and from the end of one, as by the definition."""
    tokens_BT = np.random.default_rng(0).integers(0, num_letters, (20, 40))
    detections = [
        RepetitionDetection(
            min_pattern_size=1 + i % 4, max_pattern_size=4 + i % 3, min_count=2 + i % 2
        )
        for i in range(20)
    ]
    bounds = np.array([(d.min_pattern_size, d.max_pattern_size, d.min_count) for d in detections])
    bounds[-1] = 0
    runs_BP = np.zeros((20, 6), np.int64)
    for last in range(40):
        extend_runs(runs_BP, tokens_BT, np.full(20, last))
        for row, runs_P in zip(tokens_BT, runs_BP, strict=True):
            assert runs_P.tolist() == runs_at_end(row[: last + 1], 6).tolist()
        expected = [
            repeats(row[: last + 1].tolist(), d)
            for row, d in zip(tokens_BT, detections, strict=True)
        ]
        assert is_repetitive(runs_BP, *bounds.T).tolist() == [*expected[:-1], False]


async def test_sleep_frees_keys_and_values(tied: TinyModel) -> None:
    """256 samples of 512 tokens: two layers of 32 MiB keys and 32 MiB values."""
    engine = HFEngine.from_pretrained(tied.path, max_num_seqs=256)
    request = make_request("r", 500, n=256, max_tokens=12)
    await collect(engine, request)
    before = tensor_bytes()
    await engine.sleep()
    assert before - tensor_bytes() > 64 << 20
    await engine.wake()
    assert max(errors(tied.old, [request], await collect(engine, replace(request, n=2)))) < 1e-5


async def test_dropped_weights_have_no_memory(tied: TinyModel) -> None:
    """Until they wake: then they have places, in which only an update puts values."""
    model = decoding.load_model(tied.path, dtype=torch.float32, max_model_len=None)[0]
    engine = HFEngine(model, eos_token_ids=EOS_TOKEN_IDS, max_num_seqs=4)
    parameters: list[torch.nn.Parameter] = list(model.parameters())
    shapes = [p.shape for p in parameters]
    await engine.sleep(keep_weights=False)
    assert not any(p.untyped_storage().nbytes() for p in parameters)
    await engine.wake(cache=False)
    assert [p.shape for p in parameters] == shapes
    for parameter in parameters:
        torch.nn.init.constant_(parameter, torch.nan)
    await engine.update_weights(tied.new.state_dict().items(), version=1)
    await engine.wake()
    request = make_request("r", 8, n=2)
    assert max(errors(tied.new, [request], await collect(engine, request))) < 1e-5


async def test_result_does_not_depend_on_n(tied: TinyModel) -> None:
    engine = HFEngine.from_pretrained(tied.path)
    request = make_request("r", 8, n=6, max_tokens=20)
    more = await collect(engine, request)
    fewer = await collect(engine, replace(request, n=2))
    assert all(more[key].token_ids.tolist() == c.token_ids.tolist() for key, c in fewer.items())


async def test_shared_prompt_is_computed_once(tied: TinyModel) -> None:
    engine = HFEngine.from_pretrained(tied.path)
    await collect(engine, make_request("r", 30, n=10))
    assert engine.stats().prompt_tokens == 30


async def test_eos_token_ids_may_be_given(tied: TinyModel) -> None:
    engine = HFEngine.from_pretrained(tied.path, eos_token_ids=[])
    found = await collect(engine, make_request("r", 5, n=40, max_tokens=30))
    assert {len(c.token_ids) for c in found.values()} == {30}


def test_no_slots_are_refused(tied: TinyModel) -> None:
    with pytest.raises(ValueError, match="max_num_seqs is 0; expected at least 1"):
        HFEngine.from_pretrained(tied.path, max_num_seqs=0)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES),
        Qwen3Config(**SIZES),
        Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        MistralConfig(**SIZES, sliding_window=None),
        GPT2Config(
            vocab_size=96, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.15
        ),
    ],
    ids=lambda config: config.model_type,
)
async def test_architectures(config: PreTrainedConfig, tmp_path: Path) -> None:
    model = _save(config, tmp_path)
    requests = [
        make_request(f"r{i}", 3 + 20 * i, n=2, temperature=0.7, max_tokens=20) for i in range(3)
    ]
    found = await collect(HFEngine.from_pretrained(tmp_path, max_num_seqs=4), *requests)
    assert max(errors(model, requests, found)) < 1e-5


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=2),
        Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
    ],
    ids=lambda config: config.model_type,
)
def test_models_with_other_layers_are_refused(config: PreTrainedConfig, tmp_path: Path) -> None:
    _save(config, tmp_path)
    with pytest.raises(
        EngineModelError, match=f"'{config.model_type}' does not run all its layers through"
    ):
        HFEngine.from_pretrained(tmp_path)


WINDOW: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 4}


@pytest.mark.parametrize(
    "config",
    [
        Cohere2Config(**SIZES, **WINDOW, logit_scale=0.5),
        Gemma2Config(
            **SIZES,
            **WINDOW,
            attn_logit_softcapping=0.5,
            final_logit_softcapping=3.0,
            query_pre_attn_scalar=4,
        ),
        Gemma3TextConfig(**SIZES, **WINDOW),
        GptOssConfig(**SIZES, **WINDOW, **EXPERTS),
        MistralConfig(**SIZES, sliding_window=8),
        PhimoeConfig(**SIZES, **EXPERTS, sliding_window=8),
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    ],
    ids=lambda config: config.model_type,
)
async def test_windows_caps_and_sinks(
    config: PreTrainedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and samples shorter than the window and longer, with all scores at once and some at a time."""
    _save(config, tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.copy_(torch.linspace(-1, 2, 4))
    model.save_pretrained(tmp_path)
    requests = [
        make_request(f"r{i}", 3 + 10 * i, n=2, temperature=0.7, max_tokens=20) for i in range(4)
    ]
    for num_scores in (1 << 26, 500):
        monkeypatch.setattr(plain_attention, "_NUM_PLAIN_SCORES", num_scores)
        found = await collect(HFEngine.from_pretrained(tmp_path, max_num_seqs=4), *requests)
        assert max(errors(model, requests, found)) < 1e-5


def test_a_window_that_layers_do_not_pass_on_is_refused(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES)
    config.sliding_window = 8
    _save(config, tmp_path)
    with pytest.raises(
        EngineModelError,
        match=r"^sliding_window of 'llama' is 8, and its layers do not pass it",
    ):
        HFEngine.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (DogeConfig(**SIZES), "DogeAttention computes an attention mask of its own"),
        (
            FalconConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4),
            "'falcon' does not load",
        ),
        (
            Gemma3TextConfig(**SIZES, use_bidirectional_attention=True),
            r"'gemma3_text' in the hf engine differ .* by [\d.]+ on average \(at most 0.001",
        ),
        (NemotronConfig(**SIZES), "NemotronAttention is not given the keyword arguments"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_what_the_engine_does_not_compute_is_refused_when_it_starts(
    config: PreTrainedConfig, reason: str, tmp_path: Path
) -> None:
    _save(config, tmp_path)
    with pytest.raises(EngineModelError, match=reason):
        HFEngine.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "shape",
            r"the weights in .* do not fit its config.json: model.norm.weight has shape \[7\]; expected \[64\]",
        ),
        ("nan", "model.norm.weight of 'qwen2' holds nan or infinity; expected finite weights"),
        ("missing", "lack 1 of the model's tensors, such as model.norm.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, change: str, message: str) -> None:
    _save(Qwen2Config(**SIZES), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    norm = weights.pop("model.norm.weight")
    if change == "shape":
        weights["model.norm.weight"] = torch.ones(7)
    if change == "nan":
        weights["model.norm.weight"] = norm * torch.nan
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RolloutError, match=message):
        HFEngine.from_pretrained(tmp_path)


async def test_longrope_is_computed_up_to_the_length_at_which_its_factors_change(
    tmp_path: Path,
) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 32,
    }
    model = _save(
        Phi3Config(**SIZES, rope_parameters=rope, original_max_position_embeddings=32), tmp_path
    )
    engine = HFEngine.from_pretrained(tmp_path, max_model_len=32)
    requests = [make_request("r", 12, n=2, max_tokens=20), make_request("s", 5, n=2, max_tokens=9)]
    found = await collect(engine, *requests)
    assert max(errors(model, requests, found)) < 1e-5
    with pytest.raises(RequestError, match="33; expected at most 32"):
        await collect(engine, make_request("t", 13, max_tokens=20))
    with pytest.raises(
        EngineModelError,
        match=r"^max_model_len is 33; expected at most 32 for rope_type 'longrope'",
    ):
        HFEngine.from_pretrained(tmp_path, max_model_len=33)


async def test_weights_that_replace_dropped_ones_are_taken_one_by_one(tied: TinyModel) -> None:
    """No more than one is in memory besides the engine's own; what fails half-way is followed by another update."""
    engine = HFEngine.from_pretrained(tied.path)
    alive = weakref.WeakSet[torch.Tensor]()
    most: list[int] = []

    def made(names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            copy = tied.new.state_dict().get(name, torch.zeros(3)).clone()
            alive.add(copy)
            most.append(len(alive))
            yield name, copy
            del copy

    names = [name for name in tied.new.state_dict() if name != "lm_head.weight"]
    await engine.update_weights(made(names), version=1)
    assert max(most) == len(names), "the old weights stay until all are checked"
    await engine.sleep(keep_weights=False)
    await engine.wake(cache=False)
    for wrong, message in (
        (names[:4], "missing names"),
        ([*names[:4], "model.unknown"], "'model.unknown'"),
    ):
        with pytest.raises(ValueError, match=message):
            await engine.update_weights(made(wrong), version=2)
        with pytest.raises(RolloutError, match="weights were dropped"):
            await engine.wake()
        assert engine.weight_version == 1
    most.clear()
    await engine.update_weights(made(names), version=2)
    assert max(most) <= 2
    await engine.wake()
    request = make_request("r", 9, n=2)
    assert max(errors(tied.new, [request], await collect(engine, request))) < 1e-5
    await engine.close()


def test_stop_strings_of_bytes(tmp_path: Path) -> None:
    """A character of several tokens is none before the last; strings are found over any parts."""
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.save_pretrained(tmp_path)
    strings = StopStrings(tmp_path)
    stop = ("é!", "\n\n")
    strings.check(
        Request(
            request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1, stop=stop)
        )
    )
    ids = fast("a " * 50 + "caf" + "é!" + " more")["input_ids"]
    end = len(ids) - len(" more")
    assert strings.find_end(ids, stop) == end
    assert strings.find_end(ids[: end - 1], stop) is None
    assert [
        strings.find_end(ids[k:], stop, before=[ids[:3], ids[3:k]]) for k in (3, 90, end - 1)
    ] == [
        end - 3,
        end - 90,
        1,
    ]
    assert strings.find_end(fast("a\n\nb")["input_ids"], stop) == 3
    assert strings.find_end(ids, ()) is None


def test_stop_strings_need_a_tokenizer(tmp_path: Path) -> None:
    request = Request(
        request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=1, stop=("a",))
    )
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(
        RequestError,
        match=r"request 'r' has stop=\('a',\); expected none, or an engine whose model",
    ):
        StopStrings(tmp_path).check(request)
    with pytest.raises(RequestError, match=r"stop is 'a'; expected strings that are not empty"):
        SamplingParams(max_tokens=1, stop="a")  # pyright: ignore[reportArgumentType]
