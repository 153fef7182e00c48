"""The experts that engines return, against what transformers' routers choose for a whole sequence."""

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from engine_oracles import (
    EOS_TOKEN_IDS,
    MAX_LENGTH,
    VLLM_IMPORT_WARNINGS,
    VOCAB_SIZE,
    TinyModel,
    collect,
    interrupt,
    make_engine,
    make_request,
    save_tokenizer,
    until_sampled,
)
from numpy.typing import NDArray
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from gcore_rollout import Completion, EngineModelError, EngineProcess, HFEngine, Request

ENGINES = [
    "hf",
    pytest.param("vllm", marks=[pytest.mark.slow, *VLLM_IMPORT_WARNINGS]),
]
NUM_LAYERS, TOP_K = 2, 2
"""Layers with experts; a third one has none."""


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    path = tmp_path_factory.mktemp("moe")
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = Qwen3MoeConfig(
        **heads,
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS + 1,
        max_position_embeddings=MAX_LENGTH,
        num_experts=6,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=32,
        mlp_only_layers=[1],
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_IDS,
        initializer_range=0.1,
    )
    models: list[Any] = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(Qwen3MoeForCausalLM(config).eval().requires_grad_(False))
    models[0].save_pretrained(path)
    save_tokenizer(path)
    return TinyModel(path, *models)


def chosen_experts(model: Any, request: Request, completion: Completion) -> NDArray[np.int64]:
    """[P + T - 1, L, K] that the routers of transformers choose, sorted, as the order of experts has no meaning."""
    chosen: list[torch.Tensor] = []
    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    hooks = [r.register_forward_hook(lambda *a: chosen.append(a[2][2])) for r in routers]
    tokens = torch.tensor([*request.prompt_token_ids, *completion.token_ids.tolist()])
    model(tokens[None, :-1])
    for hook in hooks:
        hook.remove()
    assert len(chosen) == NUM_LAYERS
    return torch.stack(chosen, dim=1).sort().values.numpy()


def returned_experts(completion: Completion) -> NDArray[np.int16]:
    assert completion.routed_experts is not None
    assert completion.routed_experts.dtype == np.int16
    return np.sort(completion.routed_experts)


def requests() -> list[Request]:
    """Prompts longer than a block of cached keys, and one that is shorter; samples end at different lengths."""
    return [
        make_request("long", 70, n=3, max_tokens=24, seed=1),
        make_request("short", 5, n=2, max_tokens=40, seed=2),
        replace(make_request("long", 70, n=2, max_tokens=8, seed=3), request_id="again"),
    ]


@pytest.mark.parametrize("kind", ENGINES)
async def test_experts_are_those_of_transformers(kind: str, moe: TinyModel) -> None:
    """Of every token but the last, those of prompts that several samples and requests share included."""
    engine = make_engine(kind, moe, max_num_seqs=4, return_routed_experts=True)
    by_id = {request.request_id: request for request in requests()}
    found = await collect(engine, *by_id.values())
    assert len({c.token_ids.size for c in found.values()}) > 2
    for completion in found.values():
        expected = chosen_experts(moe.old, by_id[completion.request_id], completion)
        assert np.array_equal(returned_experts(completion), expected)
    await engine.close()


@pytest.mark.parametrize("kind", ENGINES)
async def test_a_stop_string_ends_them_too(kind: str, moe: TinyModel) -> None:
    engine = make_engine(kind, moe, return_routed_experts=True)
    request = make_request("long", 70, n=6, max_tokens=60, seed=1)
    sampling = replace(request.sampling, stop=("a",))
    request = replace(request, sampling=sampling)
    for completion in (await collect(engine, request)).values():
        assert np.array_equal(
            returned_experts(completion), chosen_experts(moe.old, request, completion)
        )
    await engine.close()


@pytest.mark.parametrize("kind", ENGINES)
async def test_continued_samples_keep_the_experts_of_their_first_tokens(
    kind: str, moe: TinyModel
) -> None:
    """Those after them are by the weights that sampled them, as their log-probs are."""
    engine = make_engine(kind, moe, return_routed_experts=True)
    request = make_request("long", 70, n=3, max_tokens=40, seed=5)
    found = await interrupt(engine, request, after=30)
    parts = [c for c in found.values() if c.finish_reason == "abort" and c.token_ids.size]
    assert parts
    for part in parts:
        assert np.array_equal(returned_experts(part), chosen_experts(moe.old, request, part))
    await engine.update_weights(moe.new.state_dict().items(), version=1)
    indices = tuple(part.index for part in parts)
    rest = replace(request, indices=indices, prefixes=tuple(parts))
    continued = await collect(engine, rest)
    for part in parts:
        completion = continued["long", part.index]
        num_old = 70 + part.token_ids.size - 1
        assert completion.token_ids.size > part.token_ids.size
        by_new = chosen_experts(moe.new, request, completion)
        experts = returned_experts(completion)
        assert np.array_equal(experts[:num_old], returned_experts(part))
        assert np.array_equal(experts[num_old:], by_new[num_old:])
        assert not np.array_equal(experts[:num_old], by_new[:num_old])
    await engine.close()


@pytest.mark.parametrize("kind", ENGINES)
async def test_weights_that_change_meanwhile(kind: str, moe: TinyModel) -> None:
    """Running samples go on over old keys and values; whatever starts later has nothing of the old weights."""
    engine = make_engine(kind, moe, return_routed_experts=True)
    request = make_request("long", 70, n=1, max_tokens=60, seed=4)
    task = asyncio.create_task(collect(engine, request))
    await until_sampled(engine, 10)
    await engine.pause()
    await engine.update_weights(moe.new.state_dict().items(), version=1)
    await engine.resume()
    [completion] = (await task).values()
    num_old = 70 + int((completion.weight_versions == 0).sum()) - 1
    assert 70 < num_old < returned_experts(completion).shape[0]
    by_old = chosen_experts(moe.old, request, completion)
    assert np.array_equal(returned_experts(completion)[:num_old], by_old[:num_old])
    assert not np.array_equal(returned_experts(completion), by_old)
    for later in (await collect(engine, replace(request, request_id="later", n=2))).values():
        assert np.array_equal(returned_experts(later), chosen_experts(moe.new, request, later))
    await engine.close()


@pytest.mark.parametrize("kind", ENGINES)
async def test_sleep_forgets_what_was_cached(kind: str, moe: TinyModel) -> None:
    engine = make_engine(kind, moe, return_routed_experts=True)
    request = make_request("long", 70, n=2, max_tokens=10, seed=4)
    first = await collect(engine, request)
    await engine.sleep()
    await engine.wake()
    for key, completion in (await collect(engine, request)).items():
        assert np.array_equal(returned_experts(completion), returned_experts(first[key]))
    await engine.close()


@pytest.mark.slow
@pytest.mark.filterwarnings(*(m.args[0] for m in VLLM_IMPORT_WARNINGS))
async def test_ranks_of_vllm_return_them(moe: TinyModel) -> None:
    engine = make_engine("vllm", moe, tensor_parallel_size=2, return_routed_experts=True)
    request = make_request("long", 70, n=3, max_tokens=24, seed=1)
    for completion in (await collect(engine, request)).values():
        assert np.array_equal(
            returned_experts(completion), chosen_experts(moe.old, request, completion)
        )
    await engine.close()


@pytest.mark.slow
async def test_a_process_sends_them_along(moe: TinyModel) -> None:
    make = partial(HFEngine.from_pretrained, moe.path, return_routed_experts=True)
    engine = await EngineProcess.start(make, num_threads=1)
    request = make_request("short", 5, n=2, max_tokens=10, seed=2)
    for completion in (await collect(engine, request)).values():
        assert np.array_equal(
            returned_experts(completion), chosen_experts(moe.old, request, completion)
        )
    await engine.close()


async def test_they_are_returned_only_if_asked_for(moe: TinyModel) -> None:
    engine = make_engine("hf", moe)
    for completion in (await collect(engine, make_request("short", 5))).values():
        assert completion.routed_experts is None
    await engine.close()


@pytest.mark.parametrize("kind", ENGINES)
def test_a_dense_model_has_none(kind: str, tied: TinyModel) -> None:
    with pytest.raises(EngineModelError, match="return_routed_experts is True; expected False"):
        make_engine(kind, tied, return_routed_experts=True)


def test_static_shapes_are_refused(moe: TinyModel) -> None:
    with pytest.raises(EngineModelError, match="decode_mode is 'static'; expected auto or dynamic"):
        make_engine("hf-static", moe, return_routed_experts=True)


@pytest.mark.slow
@pytest.mark.filterwarnings(*(m.args[0] for m in VLLM_IMPORT_WARNINGS))
def test_speculation_on_cpu_is_refused(moe: TinyModel) -> None:
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    with pytest.raises(EngineModelError, match="on CPU, no speculative_config"):
        make_engine("vllm", moe, return_routed_experts=True, speculative_config=speculation)
