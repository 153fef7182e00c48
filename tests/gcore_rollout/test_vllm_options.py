"""vLLM's settings by device, seeds, cached prefixes, and steps that overlap."""

import asyncio
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_oracles import (
    VLLM_IMPORT_WARNINGS,
    TinyModel,
    collect,
    engine_args,
    errors,
    make_engine,
    make_request,
    overlap_steps,
    reference_after_swap,
    until_sampled,
)
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from gcore_rollout import VLLMEngine
from gcore_rollout.engines.vllm import process
from gcore_rollout.engines.vllm.options import (
    OwnGenerators,
    device_options,
    draws_by_sample,
    fit_num_seqs,
    rounds_logits,
    usage_context,
)

pytestmark = VLLM_IMPORT_WARNINGS

DENSE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
MIXTURE: dict[str, Any] = DENSE | {"num_experts_per_tok": 2}


@pytest.mark.parametrize(
    "config",
    [
        Qwen3MoeConfig(**MIXTURE, num_experts=4, moe_intermediate_size=8),
        Qwen2MoeConfig(**MIXTURE, num_experts=4, moe_intermediate_size=8),
        OlmoeConfig(**MIXTURE, num_experts=4),
        MixtralConfig(**MIXTURE, num_local_experts=4),
        PhimoeConfig(**MIXTURE, num_local_experts=4),
        DeepseekV3Config(
            **MIXTURE,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=8,
            first_k_dense_replace=1,
        ),
        GptOssConfig(**MIXTURE, num_local_experts=4, head_dim=8),
        Qwen2Config(**DENSE),
    ],
    ids=lambda config: config.model_type,
)
def test_weights_are_published_by_the_names_of_the_folder(config: Any, tmp_path: Path) -> None:
    """As transformers saves them, without copies."""
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    shapes = process.checkpoint_shapes(tmp_path)
    weights = list(model.state_dict().items())
    published = dict(process.publish_weights(tmp_path, shapes, weights, is_tied=False))
    assert published.keys() == saved.keys()
    memory = {tensor.untyped_storage().data_ptr() for _, tensor in weights}
    for name, tensor in published.items():
        assert torch.equal(tensor, saved[name]), name
        assert tensor.untyped_storage().data_ptr() in memory


def test_weights_of_another_model_are_not_published(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(Qwen2Config(**DENSE)).save_pretrained(tmp_path)
    shapes = process.checkpoint_shapes(tmp_path)
    with pytest.raises(ValueError, match="weights do not match the model: unknown names"):
        process.publish_weights(tmp_path, shapes, [("other", torch.ones(2))], is_tied=False)


def test_logits_are_rounded_where_the_trainers_are() -> None:
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    assert not rounds_logits(names, torch.bfloat16, on_cpu=False)
    assert not rounds_logits(names[:1], torch.float16, on_cpu=False), "a tied head"
    assert rounds_logits(names, torch.bfloat16, on_cpu=True)
    assert rounds_logits(names, torch.float32, on_cpu=False), "there is nothing to round"
    assert rounds_logits([*names, "lm_head.weight_scale"], torch.bfloat16, on_cpu=False)
    assert rounds_logits(["lm_head.qweight"], torch.bfloat16, on_cpu=False)


@pytest.mark.slow
async def test_logits_that_are_not_rounded_are_nearer_to_the_trainers_on_a_gpu(
    tmp_path: Path,
) -> None:
    """Of a model with logits of up to 30: they lie an eighth apart in bfloat16."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        **DENSE,
        "vocab_size": 2048,
        "hidden_size": 128,
        "num_attention_heads": 4,
    }
    model: Any = AutoModelForCausalLM.from_config(Qwen2Config(**sizes), dtype=torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.mul_(30)
    model.save_pretrained(tmp_path)
    engine_args()
    requests = [make_request(str(i), 12, n=4, max_tokens=32) for i in range(8)]
    divergences: list[float] = []
    for overrides in ({}, {"head_dtype": "float32"}):
        engine = VLLMEngine.from_pretrained(
            tmp_path,
            dtype=torch.bfloat16,
            max_model_len=64,
            eos_token_ids=(0,),
            kv_cache_memory_bytes=64 << 20,
            engine_args={"hf_overrides": overrides},
        )
        differences: list[Any] = []
        for (request_id, _), completion in (await collect(engine, *requests)).items():
            prompt = requests[int(request_id)].prompt_token_ids
            ids = torch.tensor([[*prompt, *completion.token_ids]])
            with torch.no_grad():
                hidden = model.model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
                logits = hidden.float() @ model.lm_head.weight.float().T
            log_probs = logits.log_softmax(-1)[range(len(hidden)), completion.token_ids]
            differences.append(log_probs.numpy() - completion.log_probs)
        log_ratio = np.concatenate(differences)
        # k3 of http://joschu.net/blog/kl-approx.html
        divergences.append(float((np.exp(log_ratio) - 1 - log_ratio).mean()))
        await engine.close()
    rounded, exact = divergences
    assert exact < 0.7 * rounded, f"{rounded:.2e} with rounded logits, {exact:.2e} without"


GIB = 1 << 30
GPU: dict[str, Any] = {"weight_bytes": 16 * GIB, "memory_bytes": 80 * GIB}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Of 80 GiB, 73.6 are vLLM's, 16 of them weights. A token has 64 KiB: 2 x 57.6 GiB are 921 samples of 2,048.
        ({"max_model_len": 2048}, 921),
        ({"max_model_len": 2048, "kv_cache_memory_bytes": 20 * GIB}, 320),
        ({"max_model_len": 2048, "gpu_memory_utilization": 0.5}, 384),
        # Half of the weights, and half of the heads of each layer.
        ({"max_model_len": 4096, "tensor_parallel_size": 2}, 1024),
        ({"max_model_len": 8192, "tensor_parallel_size": 2}, 524),
        ({"max_model_len": 4096, "kv_cache_dtype": "fp8"}, 921),
        ({"max_model_len": 8192}, 256),
        ({"max_model_len": 512}, 1024),
        ({"max_model_len": 512, "max_num_batched_tokens": 512}, 512),
    ],
)
def test_how_many_samples_keys_and_values_fit_of(
    options: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    config = Qwen2Config(
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_hidden_layers=32,
        max_position_embeddings=8192,
        dtype=torch.bfloat16,
        architectures=["Qwen2ForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    args = engine_args()(model=str(tmp_path), skip_tokenizer_init=True, **options)
    assert fit_num_seqs(args, **GPU) == expected


@pytest.mark.slow
async def test_a_token_takes_as_many_bytes_as_vllm_says(tied: TinyModel) -> None:
    """Of vLLM's own blocks: twice as many tokens as fit are divided by the longest length."""
    kv_bytes = 16 << 20
    engine: Any = VLLMEngine.from_pretrained(tied.path, kv_cache_memory_bytes=kv_bytes)
    config = engine._engine.vllm_config
    num_tokens = config.cache_config.num_gpu_blocks * config.cache_config.block_size
    args = engine_args()(
        model=str(tied.path), dtype=torch.float32, kv_cache_memory_bytes=kv_bytes, max_model_len=64
    )
    assert fit_num_seqs(args, **GPU) == min(1024, max(256, 2 * num_tokens // 64))
    await engine.close()


def test_options_by_device() -> None:
    asked: dict[str, Any] = {"gpu_memory_utilization": 0.4, "enable_sleep_mode": True}
    on_gpu, on_cpu = device_options(on_cpu=False, **asked), device_options(on_cpu=True, **asked)
    assert on_gpu["gpu_memory_utilization"] == 0.4
    assert not on_gpu["enforce_eager"], "CUDA graphs"
    assert (
        on_gpu["enable_chunked_prefill"]
        is on_gpu["async_scheduling"]
        is on_gpu["max_num_batched_tokens"]
        is on_gpu["kv_cache_memory_bytes"]
        is None
    ), "vLLM's choice"
    assert on_gpu["enable_sleep_mode"]
    assert "gpu_memory_utilization" not in on_cpu
    assert on_cpu["enforce_eager"]
    assert on_cpu["kv_cache_memory_bytes"] == 1 << 30
    assert (
        on_cpu["enable_chunked_prefill"]
        is on_cpu["async_scheduling"]
        is on_cpu["enable_sleep_mode"]
        is False
    )
    chosen: dict[str, Any] = {
        "async_scheduling": False,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 5,
        "max_num_batched_tokens": 7,
    }
    for on in (True, False):
        assert chosen.items() <= device_options(on_cpu=on, **chosen).items()
    assert "gpu_memory_utilization" not in device_options(on_cpu=False), "vLLM's own"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gpu_memory_utilization": 0.0},
            r"gpu_memory_utilization is 0.0; expected a number in \(0, 1\], or None",
        ),
        (
            {"gpu_memory_utilization": 1.1},
            r"gpu_memory_utilization is 1.1; expected a number in \(0, 1\], or None",
        ),
        (
            {"max_num_batched_tokens": 0},
            "max_num_batched_tokens is 0; expected at least 1, or None",
        ),
    ],
)
def test_options_out_of_bounds_are_refused(
    options: dict[str, Any], message: str, tied: TinyModel
) -> None:
    with pytest.raises(ValueError, match=message):
        VLLMEngine.from_pretrained(tied.path, **options)


@pytest.mark.parametrize(
    ("num_ranks", "blocked", "gpu"), [(1, 1, "GPU-0"), (3, 0, "GPU-0"), (3, 1, None), (3, 2, None)]
)
def test_ranks_open_memory_of_a_gpu_that_all_can_access(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, blocked: int, gpu: str | None
) -> None:
    """Weights stay on the first rank's GPU where no other rank is ``blocked`` from it."""

    class StandIn(VLLMEngine):
        def __init__(self) -> None:
            self._on_cpu = False
            self._num_ranks = num_ranks

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda rank, _: rank != blocked)
    properties = SimpleNamespace(uuid="GPU-0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert StandIn().weights_gpu == gpu


def test_samples_have_seeds_where_they_cost_nothing() -> None:
    assert draws_by_sample(None, on_cpu=True, has_v2_runner=False)
    assert draws_by_sample(None, on_cpu=False, has_v2_runner=True)
    assert not draws_by_sample(None, on_cpu=False, has_v2_runner=False)
    assert draws_by_sample(True, on_cpu=False, has_v2_runner=False)
    assert not draws_by_sample(False, on_cpu=True, has_v2_runner=False)


def test_generators_of_an_engine_are_its_own() -> None:
    def draw() -> tuple[float, float]:
        return torch.rand(()).item(), float(np.random.rand())

    torch.manual_seed(3)
    np.random.seed(3)
    undisturbed = [draw() for _ in range(2)]
    torch.manual_seed(3)
    np.random.seed(3)
    own = OwnGenerators(on_cpu=True)
    drawn: list[tuple[float, float]] = []
    outside = [draw()]
    for seed in (2**63 - 1, None, 2**63 - 1):
        with own.in_use(seed):
            drawn.append(draw())
    outside.append(draw())
    assert outside == undisturbed
    assert drawn[0] == drawn[2]
    assert not set(drawn[0]) & set(drawn[1])


@pytest.mark.slow
def test_vllm_takes_all_options() -> None:
    arguments = engine_args()
    assert {*device_options(on_cpu=False, gpu_memory_utilization=0.5)} <= {
        field.name for field in fields(arguments)
    }
    usage = usage_context(on_cpu=False)
    assert usage is not None
    assert usage in arguments.get_batch_defaults(1)[0]
    assert usage_context(on_cpu=True) is None


@pytest.mark.slow
async def test_samples_without_seeds(tied: TinyModel) -> None:
    """They differ within a group, between calls and between steps, and repeat with the same calls on a new engine."""
    request = make_request("r", 9, n=4, max_tokens=30)
    found: list[list[list[int]]] = []
    for _ in range(2):
        engine = make_engine("vllm", tied, eos_token_ids=[], seed_per_sample=False)
        before = torch.get_rng_state().tolist(), str(np.random.get_state())
        first = await collect(engine, request)
        again = await collect(engine, replace(request, seed=1))
        assert (torch.get_rng_state().tolist(), str(np.random.get_state())) == before
        assert max(errors(tied.old, [request], first | again)) < 1e-5
        tokens = [c.token_ids.tolist() for c in (*first.values(), *again.values())]
        assert len({tuple(t) for t in tokens}) == 8
        assert all(len(set(t)) > 10 for t in tokens)
        found.append(sorted(tokens))
        await engine.close()
    assert found[0] == found[1]


@pytest.mark.slow
async def test_cached_prefixes_are_of_one_version(tied: TinyModel) -> None:
    """A prompt is found again as long as its weights last; samples in flight leave nothing behind for later ones."""
    engine: Any = make_engine("vllm", tied, eos_token_ids=[])
    cached: dict[int, list[int]] = {}
    step: Callable[[], list[Any]] = engine._engine.step

    def noted() -> list[Any]:
        outputs = step()
        cached.setdefault(engine.weight_version, []).extend(
            output.num_cached_tokens for output in outputs
        )
        return outputs

    engine._engine.step = noted
    request = make_request("r", 300, max_tokens=20)
    await collect(engine, request)
    await collect(engine, request)
    running = asyncio.create_task(
        collect(engine, replace(request, sampling=replace(request.sampling, max_tokens=120)))
    )
    await until_sampled(engine, 40)
    await engine.update_weights(tied.new.state_dict().items(), version=1)
    fresh = await collect(engine, replace(request, seed=5))
    assert max(errors(tied.new, [request], fresh)) < 1e-5
    # Blocks that it filled with the new weights stand on old ones.
    (in_flight,) = (await running).values()
    assert set(in_flight.weight_versions) == {0, 1}
    longer = replace(
        request, prompt_token_ids=(*request.prompt_token_ids, *in_flight.token_ids.tolist())
    )
    assert max(errors(tied.new, [longer], await collect(engine, longer))) < 1e-5
    block = engine._engine.vllm_config.cache_config.block_size
    most = 299 // block * block
    assert most > 0
    assert cached[0] == [0, most]
    assert cached[1] == [0, most, most]
    await engine.close()


def _places(model: torch.nn.Module) -> dict[str, int]:
    return {name: p.data_ptr() for name, p in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.slow
async def test_steps_that_overlap(tied: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU, where vLLM turns it off: tokens have the version that drew them, and no step is in flight in a pause."""
    overlap_steps(monkeypatch)
    engine: Any = make_engine("vllm", tied, eos_token_ids=[])
    queue = engine._engine.engine_core.engine_core.batch_queue

    def in_flight() -> int:
        return sum(step.total_num_scheduled_tokens for _, step, _ in queue)

    requests = [make_request(f"r{i}", 20 + i, n=2, max_tokens=60) for i in range(3)]
    running = asyncio.create_task(collect(engine, *requests))
    await until_sampled(engine, 60)
    assert in_flight()
    await engine.pause()
    assert not in_flight()
    await engine.resume()
    await until_sampled(engine, 60)
    assert in_flight()
    before = engine._engine.apply_model(_places)
    await engine.update_weights(tied.new.state_dict().items(), version=1)
    after = engine._engine.apply_model(_places)
    assert after == before, "CUDA graphs would compute with freed memory"
    found = await running
    for request in requests:
        for index in range(2):
            c = found[request.request_id, index]
            assert c.weight_versions.tolist() == sorted(c.weight_versions)
            num_old = int((c.weight_versions == 0).sum())
            assert 0 < num_old < 60
            expected = reference_after_swap(tied.old, tied.new, request, c.token_ids, num_old)
            np.testing.assert_allclose(c.log_probs, expected, atol=1e-5, rtol=0)
    # Aborted samples have the tokens that have come.
    running = asyncio.create_task(collect(engine, requests[0]))
    await until_sampled(engine, 20)
    await engine.abort()
    assert max(errors(tied.new, requests, await running)) < 1e-5
    await engine.sleep()
    assert not in_flight()
    await engine.wake()
    assert max(errors(tied.new, requests, await collect(engine, *requests))) < 1e-5
    await engine.close()
