"""Speculative decoding in vLLM: faster, and otherwise as if there were none."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_oracles import (
    VLLM_IMPORT_WARNINGS,
    VOCAB_SIZE,
    TinyModel,
    collect,
    engine_args,
    errors,
    interrupt,
    make_request,
    reference_after_swap,
    until_sampled,
)
from transformers import Qwen2Config, Qwen2ForCausalLM

from gcore_rollout import Request, SamplingParams, VLLMEngine

pytestmark = [pytest.mark.slow, *VLLM_IMPORT_WARNINGS]

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def half(tied: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layer of the model: it guesses right at times."""
    config: Any = Qwen2Config.from_pretrained(tied.path)
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    model: Any = Qwen2ForCausalLM(config)
    model.load_state_dict({name: tied.old.state_dict()[name] for name in model.state_dict()})
    path = tmp_path_factory.mktemp("half")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine(tied: TinyModel, half: Path) -> Iterator[VLLMEngine]:
    speculative = {"method": "draft_model", "model": str(half), "num_speculative_tokens": 3}
    engine_args()
    engine = VLLMEngine.from_pretrained(
        tied.path, speculative_config=speculative, kv_cache_memory_bytes=64 << 20, eos_token_ids=[]
    )
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def old(engine: VLLMEngine, tied: TinyModel) -> VLLMEngine:
    """With the model's old weights."""
    asyncio.run(
        engine.update_weights(tied.old.state_dict().items(), version=engine.weight_version + 1)
    )
    return engine


def repetitive(name: str, *, temperature: float, n: int = 1, max_tokens: int = 40) -> Request:
    """A prompt whose continuation is easy to guess from it."""
    tokens = tuple([*range(7, 12)] * 5)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    return Request(request_id=name, prompt_token_ids=tokens, sampling=sampling, n=n, seed=3)


async def test_greedy_and_sampled_ones_in_a_batch(old: VLLMEngine, tied: TinyModel) -> None:
    greedy = [make_request(f"g{i}", 9 + i, temperature=0.0, max_tokens=40) for i in range(3)]
    sampled = [repetitive(f"s{t}", temperature=t, n=4) for t in (0.5, 1.0, 1.5)]
    found = await collect(old, *greedy, *sampled)
    assert all(error < TOLERANCE for error in errors(tied.old, [*greedy, *sampled], found))
    for request in greedy:
        tokens = found[request.request_id, 0].token_ids
        logits = tied.old(torch.tensor([[*request.prompt_token_ids, *tokens.tolist()]])).logits[0]
        assert tokens.tolist() == logits[len(request.prompt_token_ids) - 1 : -1].argmax(-1).tolist()


async def test_several_tokens_come_in_a_step(old: VLLMEngine) -> None:
    """Each give-way of the event loop is a step at most."""
    running = asyncio.create_task(collect(old, repetitive("r", temperature=0.0, max_tokens=100)))
    before, most = old.stats().completion_tokens, 0
    while not running.done():
        await asyncio.sleep(0)
        now = old.stats().completion_tokens
        before, most = now, max(most, now - before)
    assert 1 < most <= 4


async def test_samples_are_drawn_from_the_policy(old: VLLMEngine, tied: TinyModel) -> None:
    """How often each token comes, against the sum of its probabilities wherever it could have come."""
    request = repetitive("r", temperature=1.0, n=400, max_tokens=12)
    found = await collect(old, request)
    tokens_NT = torch.tensor(np.stack([c.token_ids for c in found.values()]))
    prompt_NP = torch.tensor(request.prompt_token_ids).expand(len(tokens_NT), -1)
    with torch.inference_mode():
        logits = tied.old(torch.cat([prompt_NP, tokens_NT], 1)).logits[
            :, prompt_NP.shape[1] - 1 : -1
        ]
    # The first token of a completion is never guessed.
    probs_KV, drawn_K = (
        logits[:, 1:].softmax(-1).reshape(-1, VOCAB_SIZE),
        tokens_NT[:, 1:].reshape(-1),
    )
    expected_V, variance_V = probs_KV.sum(0), (probs_KV * (1 - probs_KV)).sum(0)
    counts_V = torch.bincount(drawn_K, minlength=VOCAB_SIZE)
    frequent = expected_V > 10
    assert frequent.sum() > 30
    # Of 96 normal deviates, one in 2,000 such tests has any above 4.5.
    assert float(((counts_V - expected_V) / variance_V.sqrt())[frequent].abs().max()) < 4.5


async def test_update_in_mid_generation(old: VLLMEngine, tied: TinyModel) -> None:
    requests = [
        repetitive("sampled", temperature=1.0, n=3),
        make_request("greedy", 9, temperature=0.0, max_tokens=40),
    ]
    first = old.weight_version
    running = asyncio.create_task(collect(old, *requests))
    await until_sampled(old, 30)
    await old.update_weights(tied.new.state_dict().items(), version=first + 1)
    by_id = {request.request_id: request for request in requests}
    for completion in (await running).values():
        versions = completion.weight_versions.tolist()
        num_old = versions.count(first)
        assert versions == [first] * num_old + [first + 1] * (len(versions) - num_old)
        assert 0 < num_old < len(versions)
        request = by_id[completion.request_id]
        expected = reference_after_swap(tied.old, tied.new, request, completion.token_ids, num_old)
        np.testing.assert_allclose(completion.log_probs, expected, atol=TOLERANCE, rtol=0)
    assert all(
        error < TOLERANCE for error in errors(tied.new, requests, await collect(old, *requests))
    )


async def test_abort(old: VLLMEngine, tied: TinyModel) -> None:
    requests = [repetitive("r", temperature=1.0, n=4)]
    found = await interrupt(old, *requests, after=40)
    assert all(c.finish_reason == "abort" and 0 < c.token_ids.size < 40 for c in found.values())
    assert all(error < TOLERANCE for error in errors(tied.old, requests, found))


def test_guesses_that_are_accepted_blindly_are_refused(tied: TinyModel) -> None:
    wrong = {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic"}
    with pytest.raises(
        ValueError, match="rejection_sample_method 'synthetic'; expected 'standard' or 'block'"
    ):
        VLLMEngine.from_pretrained(tied.path, speculative_config=wrong)
