"""Tiny models, and what transformers' own forward says about an engine's completions."""

import asyncio
import gc
import pickle
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models
from transformers import (
    DynamicCache,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gcore_rollout import (
    Completion,
    Engine,
    HFEngine,
    RepetitionDetection,
    Request,
    SamplingParams,
    VLLMEngine,
)
from gcore_rollout.engines.vllm import process

_REGISTER = "register_triton_kernel_overrides"
VOCAB_SIZE = 96
MAX_LENGTH = 512
EOS_TOKEN_IDS = [1, 5]

VLLM_IMPORT_WARNINGS = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning"),
]


@dataclass(frozen=True)
class TinyModel:
    """Two sets of weights of one architecture; the folder holds ``old``."""

    path: Path
    old: Any
    new: Any


Found = dict[tuple[str, int], Completion]
"""Completions by request id and index."""


def make_engine(kind: str, model: TinyModel, **options: Any) -> Engine:
    if kind.startswith("hf"):
        mode: Any = {"hf": "auto", "hf-static": "static"}[kind]
        return HFEngine.from_pretrained(model.path, decode_mode=mode, **options)
    engine_args()
    return VLLMEngine.from_pretrained(model.path, kv_cache_memory_bytes=64 << 20, **options)


@cache
def engine_args() -> Any:
    """Return vLLM's class of arguments, imported as the engine does, without its compiled helpers.

    Collections leave out what that makes. CPU kernels are registered once, not by each engine: it looks through all
    modules for them.
    """
    process.set_environment()
    with torch._dynamo.config.patch(disable=True):  # pyright: ignore[reportPrivateUsage] - it has no public name
        from vllm import EngineArgs
        from vllm.platforms.cpu import CpuPlatform
    setattr(CpuPlatform, _REGISTER, staticmethod(cache(getattr(CpuPlatform, _REGISTER))))
    gc.freeze()
    return EngineArgs


def overlap_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have vLLM schedule asynchronously on CPU, too, where it turns that off, in engines made from now on."""
    create: Callable[..., Any] = engine_args().create_engine_config

    def with_overlap(arguments: Any, *context: Any) -> Any:
        config = create(arguments, *context)
        config.scheduler_config.async_scheduling = True
        return config

    monkeypatch.setattr(engine_args(), "create_engine_config", with_overlap)


def save_tokenizer(path: Path) -> None:
    """Write a tokenizer of letters and pairs of them, so that stop strings may end within a token."""
    letters = [chr(ord("a") + i) for i in range(24)]
    pairs = [first + second for first in "abcdef" for second in "abcdefghijk"]
    tokens = ["<pad>", "<end>", "<start>", "<unk>", "<mask>", "<eos>", *letters, *pairs]
    vocabulary = {token: i for i, token in enumerate(tokens[:VOCAB_SIZE])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(path)


def make_tiny_model(path: Path, *, tie: bool, num_heads: int = 4) -> TinyModel:
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        # vLLM's CPU attention takes no head dimension below 32.
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_IDS,
    )
    old, new = (_random_model(Qwen2ForCausalLM(config), seed) for seed in (0, 1))
    old.save_pretrained(path)
    save_tokenizer(path)
    return TinyModel(path, old, new)


def make_tiny_mixture(
    path: Path, *, expert_size: int = 64, vocab_size: int = VOCAB_SIZE
) -> TinyModel:
    """A mixture of four experts, which transformers has fused and the folder has one by one."""
    sizes: dict[str, Any] = {"head_dim": 32, "moe_intermediate_size": expert_size}
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        num_experts=4,
        num_experts_per_tok=2,
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_IDS,
        **sizes,
    )
    old, new = (_random_model(Qwen3MoeForCausalLM(config), seed) for seed in (0, 1))
    old.save_pretrained(path)
    save_tokenizer(path)
    return TinyModel(path, old, new)


def _random_model(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    model.eval().requires_grad_(False)
    for parameter in model.parameters():
        # Five times the usual scale: a flat distribution would hide wrong weights and a wrong temperature.
        noise = 0.1 * torch.randn(parameter.shape, generator=generator)
        parameter.copy_(parameter + noise if parameter.dim() == 1 else noise)
    return model


def make_request(
    name: str,
    length: int,
    *,
    max_tokens: int = 16,
    temperature: float = 1.0,
    n: int = 1,
    seed: int = 0,
    expected_tokens: int | None = None,
) -> Request:
    """A request whose prompt of ``length`` tokens depends on ``name``."""
    tokens = np.random.default_rng(list(name.encode())).integers(0, VOCAB_SIZE, length)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    fields: dict[str, Any] = {
        "sampling": sampling,
        "n": n,
        "seed": seed,
        "expected_tokens": expected_tokens,
    }
    return Request(request_id=name, prompt_token_ids=tuple(tokens.tolist()), **fields)


async def collect(engine: Engine, *requests: Request) -> Found:
    """Every completion; each may come once only."""
    found: Found = {}
    async for completion in engine.generate(requests):
        key = completion.request_id, completion.index
        assert key not in found
        found[key] = completion
    return found


async def until(condition: Callable[[], object]) -> None:
    """Give way until it is true."""
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0)


async def until_sampled(engine: Engine, num_tokens: int) -> None:
    """Give way to the engine until it has sampled ``num_tokens`` more."""
    goal = engine.stats().completion_tokens + num_tokens
    await until(lambda: engine.stats().completion_tokens >= goal)


def tensor_bytes() -> int:
    """Memory of all CPU tensors of this process: unlike what is resident, nothing else in the process changes it."""
    tensors = (t for t in gc.get_objects() if type(t) is torch.Tensor and t.layout is torch.strided)
    storages = [t.untyped_storage() for t in tensors if t.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


async def until_idle(engine: Engine) -> None:
    """Give way to the engine until no sample is running or waiting."""
    await until(lambda: not (engine.stats().num_running or engine.stats().num_waiting))


async def interrupt(engine: Engine, *requests: Request, after: int) -> Found:
    """Completions of requests that are aborted once ``after`` tokens have been sampled, if they need as many."""
    goal = engine.stats().completion_tokens + after
    running = asyncio.create_task(collect(engine, *requests))
    await until(lambda: engine.stats().completion_tokens >= goal or running.done())
    await engine.abort()
    return await running


async def in_parts(engine: Engine, *requests: Request, num_tokens: int) -> tuple[Found, int]:
    """Completions of requests that are aborted after every ``num_tokens`` tokens, and how often they were."""
    found: Found = {}
    todo, num_aborts = list(requests), 0
    while todo:
        assert num_aborts < 200
        part = await interrupt(engine, *todo, after=num_tokens)
        # A request continues with all of its samples: those that are finished are made again.
        found |= {
            k: c for k, c in part.items() if k not in found or found[k].finish_reason == "abort"
        }
        todo = [r for r in (go_on(r, found) for r in todo) if r.prefixes]
        num_aborts += bool(todo)
    return found, num_aborts


def go_on(request: Request, found: Found) -> Request:
    """Return the same request continuing from the aborted samples, after a pickle and as plain values."""
    cut_short = [
        c
        for c in found.values()
        if (c.request_id, c.finish_reason) == (request.request_id, "abort")
    ]
    return replace(
        request,
        prefixes=tuple(Completion(**pickle.loads(pickle.dumps(asdict(c)))) for c in cut_short),
    )


def assert_equal(actual: Completion, expected: Completion, *, tolerance: float) -> None:
    """Equal but for rounding of the log-probs, and for the versions."""
    assert (actual.request_id, actual.index) == (expected.request_id, expected.index)
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    assert actual.finish_reason == expected.finish_reason
    np.testing.assert_allclose(actual.log_probs, expected.log_probs, atol=tolerance, rtol=0)


def repeats(tokens: Sequence[int], detection: RepetitionDetection) -> bool:
    """Whether ``tokens`` end in a pattern that is repeated often enough, by the definition."""
    count = detection.min_count
    sizes = range(detection.min_pattern_size, detection.max_pattern_size + 1)
    return any(
        len(tokens) >= p * count and list(tokens[-p * count :]) == list(tokens[-p:]) * count
        for p in sizes
    )


async def first_then_abandon(engine: Engine, requests: Sequence[Request]) -> Completion:
    iterator = cast(Any, engine.generate(requests))
    async with aclosing(iterator):
        return await anext(cast(AsyncIterator[Completion], iterator))


def errors(model: Any, requests: Sequence[Request], found: Found) -> list[float]:
    """Largest difference of each completion's log-probs from those of a forward of ``model`` over all of it."""
    by_id = {r.request_id: r for r in requests}
    return [
        float(
            np.abs(c.log_probs - reference_log_probs(model, by_id[c.request_id], c.token_ids)).max()
        )
        for c in found.values()
    ]


@torch.inference_mode()
def reference_log_probs(
    model: Any, request: Request, token_ids: NDArray[np.int64]
) -> NDArray[np.float32]:
    """log p of each of ``token_ids``, shape [T], after the request's prompt and at its temperature."""
    tokens = torch.tensor([*request.prompt_token_ids, *token_ids.tolist()])
    logits = model(tokens[None]).logits[0, len(request.prompt_token_ids) - 1 : -1]
    return _pick(logits, token_ids, request.sampling)


@torch.inference_mode()
def reference_after_swap(
    old: Any, new: Any, request: Request, token_ids: NDArray[np.int64], num_old: int
) -> NDArray[np.float32]:
    """The same where ``new`` took over after ``num_old`` >= 1 tokens, over the keys and values ``old`` had computed."""
    tokens = torch.tensor([*request.prompt_token_ids, *token_ids.tolist()])
    num_cached = len(request.prompt_token_ids) + num_old - 1
    cache = DynamicCache()
    old_logits = old(tokens[None, :num_cached], past_key_values=cache, use_cache=True).logits[0]
    new_logits = new(tokens[None, num_cached:], past_key_values=cache, use_cache=True).logits[0]
    logits = torch.cat([old_logits[len(request.prompt_token_ids) - 1 :], new_logits[:-1]])
    return _pick(logits, token_ids, request.sampling)


def _pick(
    logits_TV: torch.Tensor, token_ids: NDArray[np.int64], sampling: SamplingParams
) -> NDArray[np.float32]:
    logits_TV = logits_TV / (sampling.temperature or 1.0)
    warpers: list[Any] = []
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    for warper in warpers:
        logits_TV = warper(None, logits_TV)
    log_probs_TV = torch.log_softmax(logits_TV, dim=-1)
    return log_probs_TV.gather(1, torch.from_numpy(token_ids)[:, None])[:, 0].numpy()
