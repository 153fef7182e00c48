"""The tokens that engines return as those that top-k and top-p keep, against what transformers leaves out."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_oracles import (
    EOS_TOKEN_IDS,
    VLLM_IMPORT_WARNINGS,
    VOCAB_SIZE,
    TinyModel,
    collect,
    engine_args,
    errors,
    in_parts,
    interrupt,
    make_engine,
    make_request,
    make_tiny_model,
)
from transformers import TopKLogitsWarper, TopPLogitsWarper

from gcore_rollout import Completion, EngineModelError, HFEngine, Request
from gcore_rollout.engines.queueing import Call, QueuedSample
from gcore_rollout.engines.vllm.translation import sampling_params

ENGINES = [
    "hf",
    pytest.param("vllm", marks=[pytest.mark.slow, *VLLM_IMPORT_WARNINGS]),
]
TRUNCATIONS = {"p": (0.7, -1), "k": (1.0, 3), "both": (0.8, 5), "all": (1.0, 0)}
TEMPERATURE = 1.3
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("model"), tie=False)


def truncated_request(name: str, length: int, **options: Any) -> Request:
    top_p, top_k = TRUNCATIONS[name]
    request = make_request(name, length, temperature=TEMPERATURE, **options)
    return replace(request, sampling=replace(request.sampling, top_p=top_p, top_k=top_k))


@torch.inference_mode()
def expected_sets(model: Any, request: Request, completion: Completion) -> list[set[int]]:
    """The tokens that transformers' warpers leave over in float64; none where these are all."""
    tokens = torch.tensor([*request.prompt_token_ids, *completion.token_ids.tolist()])
    logits = model(tokens[None]).logits[0, len(request.prompt_token_ids) - 1 : -1]
    scores: Any = logits.double() / request.sampling.temperature
    if request.sampling.top_k > 0:
        scores = TopKLogitsWarper(request.sampling.top_k)(None, scores)  # pyright: ignore[reportArgumentType] - it reads no ids
    if request.sampling.top_p < 1:
        scores = TopPLogitsWarper(request.sampling.top_p)(None, scores)  # pyright: ignore[reportArgumentType] - as above
    sets = [set(row.isfinite().nonzero()[:, 0].tolist()) for row in scores]
    return [kept if len(kept) < VOCAB_SIZE else set[int]() for kept in sets]


def returned_sets(completion: Completion) -> list[set[int]]:
    assert completion.kept_counts is not None
    assert completion.kept_ids is not None
    assert completion.kept_counts.dtype == completion.kept_ids.dtype == np.int32
    assert completion.kept_counts.sum() == completion.kept_ids.size
    parts = np.split(completion.kept_ids, completion.kept_counts.cumsum()[:-1])
    return [set(part.tolist()) for part in parts]


@pytest.mark.parametrize("kind", ENGINES)
async def test_sets_are_those_of_transformers(kind: str, model: TinyModel) -> None:
    """Samples that are cut in different ways, or not at all, run together and end at different lengths."""
    engine = make_engine(kind, model, max_num_seqs=6, return_sampling_mask=True)
    requests = {
        "p": truncated_request("p", 9, n=4, max_tokens=30),
        "k": truncated_request("k", 5, n=2),
        "both": truncated_request("both", 12, n=2),
        "all": truncated_request("all", 7, n=2),
        "greedy": make_request("greedy", 6, temperature=0.0),
    }
    found = await collect(engine, *requests.values())
    assert max(errors(model.old, list(requests.values()), found)) < TOLERANCE
    for completion in found.values():
        request = requests[completion.request_id]
        if not request.sampling.truncates:
            assert completion.kept_ids is completion.kept_counts is None
            continue
        assert returned_sets(completion) == expected_sets(model.old, request, completion)
    assert len({c.token_ids.size for c in found.values()}) > 2
    await engine.close()


@pytest.mark.parametrize("kind", ENGINES)
async def test_a_stop_string_ends_them_too(kind: str, model: TinyModel) -> None:
    engine = make_engine(kind, model, return_sampling_mask=True)
    request = truncated_request("p", 9, n=6, max_tokens=60)
    request = replace(request, sampling=replace(request.sampling, stop=("a",)))
    found = await collect(engine, request)
    assert "stop" in {completion.finish_reason for completion in found.values()}
    for completion in found.values():
        assert returned_sets(completion) == expected_sets(model.old, request, completion)
    await engine.close()


@pytest.mark.parametrize("kind", ENGINES)
async def test_continued_samples_keep_the_sets_of_their_first_tokens(
    kind: str, model: TinyModel
) -> None:
    """Those after them are by the weights that sampled them, as their log-probs are."""
    engine = make_engine(kind, model, return_sampling_mask=True)
    request = truncated_request("both", 9, n=3, max_tokens=40)
    cut_short = await interrupt(engine, request, after=30)
    parts = [c for c in cut_short.values() if c.finish_reason == "abort" and c.token_ids.size]
    assert parts
    await engine.update_weights(model.new.state_dict().items(), version=1)
    indices = tuple(part.index for part in parts)
    continued = await collect(engine, replace(request, indices=indices, prefixes=tuple(parts)))
    for part in parts:
        completion = continued["both", part.index]
        num_old = part.token_ids.size
        sets = returned_sets(completion)
        assert sets[:num_old] == expected_sets(model.old, request, part)
        assert sets[num_old:] == expected_sets(model.new, request, completion)[num_old:]
    await engine.close()


async def test_a_prefix_without_sets_was_drawn_from_all_tokens(model: TinyModel) -> None:
    """As after a change of top-p, in either direction: tokens of each part keep what they were drawn from."""
    engine = make_engine("hf", model, return_sampling_mask=True)
    for first, second in (("all", "p"), ("p", "all")):
        request = truncated_request(first, 9, max_tokens=40, seed=2)
        (part,) = (await interrupt(engine, request, after=3)).values()
        assert part.finish_reason == "abort"
        sampling = truncated_request(second, 9, max_tokens=40).sampling
        rest = replace(request, sampling=sampling, prefixes=(part,))
        (completion,) = (await collect(engine, rest)).values()
        num_old = part.token_ids.size
        sets = returned_sets(completion)
        assert sets[:num_old] == expected_sets(model.old, request, part)
        assert sets[num_old:] == expected_sets(model.old, rest, completion)[num_old:]
    await engine.close()


async def test_sets_survive_aborts_pickles_and_plain_values(model: TinyModel) -> None:
    engine = make_engine("hf", model, return_sampling_mask=True)
    request = truncated_request("p", 9, n=3, max_tokens=30)
    whole = await collect(engine, request)
    parts, num_aborts = await in_parts(engine, request, num_tokens=7)
    assert num_aborts > 2
    for key, completion in whole.items():
        assert returned_sets(parts[key]) == returned_sets(completion)
        restored = Completion.from_state(completion.state())
        assert returned_sets(restored) == returned_sets(completion)
    await engine.close()


@pytest.mark.slow
@pytest.mark.filterwarnings(*(mark.args[0] for mark in VLLM_IMPORT_WARNINGS))
def test_on_a_gpu_greedy_samples_are_drawn_from_one_token() -> None:
    """There vLLM refuses requests without a temperature or a top-k."""
    engine_args()
    requests = [make_request("greedy", 6, temperature=0.0), truncated_request("both", 6)]
    settings: list[Any] = []
    for request in requests:
        sample = QueuedSample(call=Call(pending=1), request=request, index=0)
        settings.append(sampling_params(sample, EOS_TOKEN_IDS, needs_top_k=True))
    assert [(s.temperature, s.top_k) for s in settings] == [(1.0, 1), (TEMPERATURE, 5)]


@pytest.mark.slow
@pytest.mark.filterwarnings(*(mark.args[0] for mark in VLLM_IMPORT_WARNINGS))
def test_on_a_cpu_there_are_no_sets_with_speculation(model: TinyModel) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
    with pytest.raises(EngineModelError, match=r"expected False with a speculative_config on CPU"):
        make_engine("vllm", model, return_sampling_mask=True, speculative_config=speculation)


async def test_sets_are_returned_where_they_are_asked_for(model: TinyModel) -> None:
    engine = make_engine("hf", model)
    (completion,) = (await collect(engine, truncated_request("p", 9))).values()
    assert completion.kept_ids is completion.kept_counts is None
    await engine.close()
    with pytest.raises(EngineModelError, match=r"expected auto or dynamic .* return_sampling_mask"):
        HFEngine.from_pretrained(model.path, decode_mode="static", return_sampling_mask=True)
