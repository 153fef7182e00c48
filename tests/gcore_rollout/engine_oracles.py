"""Tiny models, and what transformers' own forward says about an engine's completions."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

from gcore_rollout import Completion, Engine, Request, SamplingParams
from gcore_rollout.hf_engine import HFEngine
from gcore_rollout.vllm_engine import VLLMEngine

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


def make_engine(kind: str, model: TinyModel, **options: Any) -> Engine:
    if kind == "hf":
        return HFEngine.from_pretrained(model.path, **options)
    return VLLMEngine.from_pretrained(model.path, kv_cache_memory_bytes=64 << 20, **options)


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
    old, new = (_random_model(config, seed) for seed in (0, 1))
    old.save_pretrained(path)
    return TinyModel(path, old, new)


def _random_model(config: Qwen2Config, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    model: Any = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        # Five times the usual scale: a flat distribution would hide wrong weights and a wrong temperature.
        noise = 0.1 * torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise if parameter.dim() == 2 else parameter + noise)
    return model


def make_request(name: str, length: int, *, max_tokens: int = 16, temperature: float = 1.0, **fields: int) -> Request:
    """A request whose prompt of ``length`` tokens depends on ``name``."""
    tokens = np.random.default_rng(list(name.encode())).integers(0, VOCAB_SIZE, length)
    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    return Request(request_id=name, prompt_token_ids=tuple(tokens.tolist()), sampling=sampling, **fields)


async def collect(engine: Engine, *requests: Request) -> dict[tuple[str, int], Completion]:
    """Completions by request id and index; each may come once only."""
    found: dict[tuple[str, int], Completion] = {}
    async for completion in engine.generate(requests):
        key = completion.request_id, completion.index
        assert key not in found
        found[key] = completion
    return found


async def until_sampled(engine: Engine, num_tokens: int) -> None:
    """Give way to the engine until it has sampled ``num_tokens`` more."""
    goal = engine.stats().completion_tokens + num_tokens
    async with asyncio.timeout(30):
        while engine.stats().completion_tokens < goal:
            await asyncio.sleep(0)


async def first_then_abandon(engine: Engine, requests: Sequence[Request]) -> Completion:
    iterator = cast(Any, engine.generate(requests))
    async with aclosing(iterator):
        return await anext(cast(AsyncIterator[Completion], iterator))


def errors(model: Any, requests: Sequence[Request], found: dict[tuple[str, int], Completion]) -> list[float]:
    """Largest difference of each completion's log-probs from those of a forward of ``model`` over all of it."""
    by_id = {r.request_id: r for r in requests}
    return [
        float(np.abs(c.log_probs - reference_log_probs(model, by_id[c.request_id], c.token_ids)).max())
        for c in found.values()
    ]


@torch.inference_mode()
def reference_log_probs(model: Any, request: Request, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """log p of each of ``token_ids``, shape [T], after the request's prompt and at its temperature."""
    tokens = torch.tensor([*request.prompt_token_ids, *token_ids.tolist()])
    logits = model(tokens[None]).logits[0, len(request.prompt_token_ids) - 1 : -1]
    return _pick(logits, token_ids, request.sampling.temperature)


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
    return _pick(logits, token_ids, request.sampling.temperature)


def _pick(logits_TV: torch.Tensor, token_ids: NDArray[np.int64], temperature: float) -> NDArray[np.float32]:
    log_probs_TV = torch.log_softmax(logits_TV / (temperature or 1.0), dim=-1)
    return log_probs_TV.gather(1, torch.from_numpy(token_ids)[:, None])[:, 0].numpy()
