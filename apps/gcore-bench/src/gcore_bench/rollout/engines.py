"""Engines in processes of their own: gcore's, bare vLLM and transformers, which only their processes import.

All processes are forked from one server that has imported vLLM and transformers once.
Shapes: B samples, T tokens of the longest, P tokens of the longest prompt.
"""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Figures
from gcore_bench.rollout.options import RolloutOptions
from gcore_rollout import AnySample, Engine, EngineProcess, EngineStats, Request, engine_kind, sample_seeds

ENVIRONMENT = {
    # Settings of VLLMEngine, for bare vLLM too: one process, no telemetry, eager on a CPU.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_COMPILE_DISABLE": "1",
}
"""Environment of all processes."""
_KV_CACHE_BYTES = 1 << 30
_QWEN2 = "transformers.models.qwen2.modeling_qwen2"

Generate = Callable[[Sequence[Request]], Awaitable[tuple[int, float]]]
"""Generates completions, and returns the number of their tokens and the sum of their log-probabilities."""


async def start_engine(
    name: str, factory: Callable[[], Any], options: RolloutOptions, stack: AsyncExitStack
) -> EngineProcess[Any, Any]:
    """Start a process whose engine ``factory`` makes, and which ends with ``stack``; `BenchError` if that fails."""
    with_vllm = "generation" in options.parts and any("vllm" in contender for contender in options.contenders)
    preload = (*engine_kind("vllm").preload, "vllm.entrypoints.llm") if with_vllm else engine_kind("hf").preload
    start: Any = EngineProcess.start
    try:
        engine = await start(factory, num_threads=options.threads, preload=(*preload, _QWEN2))
    except Exception as error:
        raise BenchError(f"{name} could not be started: {error}") from error
    stack.push_async_callback(engine.close)
    return engine


def make_contender(name: str, model: Path, max_num_seqs: int) -> Any:
    """Make a contender in its process; without ``-process``, it is measured there and yields a `Measured`."""
    match name:
        case "vllm":
            return _MeasuredEngine(_vllm(model, max_num_seqs))
        case "transformers":
            return _MeasuredEngine(_transformers(model))
        case _:
            _, kind, *form = name.split("-")
            mode = {"decode_mode": form[0]} if form and form[0] in ("dynamic", "static") else {}
            load = engine_kind(kind).load().from_pretrained
            engine = load(model, max_num_seqs=max_num_seqs, eos_token_ids=[], **mode)
            return engine if name.endswith("-process") else _MeasuredEngine(partial(collect, engine))


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured(AnySample):
    """The figures of a `generate` whose completions stayed in their process."""

    figures: Figures


class _MeasuredEngine:
    """The part of an engine that an `EngineProcess` needs; it yields a `Measured` in place of completions."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate

    def stats(self) -> EngineStats:
        return EngineStats(prompt_tokens=0, completion_tokens=0, num_running=0, num_waiting=0, weight_version=0)

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Measured]:
        figures = await measured(self._generate, requests, time.process_time)
        yield Measured(request_id="", index=0, finish_reason="stop", figures=figures)

    async def close(self) -> None:
        """Do nothing, because the process ends next."""


async def measured(generate: Generate, requests: Sequence[Request], cpu_time_s: Callable[[], float]) -> Figures:
    """Generate, and return the figures by the names that tables use."""
    wall_s, cpu_s = time.perf_counter(), cpu_time_s()
    tokens, log_prob_sum = await generate(requests)
    wall_s, cpu_s = time.perf_counter() - wall_s, cpu_time_s() - cpu_s
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "tokens": float(tokens),
        "tokens_per_s": tokens / wall_s,
        "log_prob": log_prob_sum / tokens,
    }


async def collect(engine: Engine, requests: Sequence[Request]) -> tuple[int, float]:
    """Generate with an engine of gcore; see `Generate`."""
    completions = [completion async for completion in engine.generate(requests)]
    return sum(c.token_ids.size for c in completions), sum(float(c.log_probs.sum()) for c in completions)


def _vllm(model: Path, max_num_seqs: int) -> Generate:
    """Load bare vLLM with the settings of `VLLMEngine`."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    options: dict[str, Any] = {
        "kv_cache_memory_bytes": _KV_CACHE_BYTES if not torch.cuda.is_available() else None,
        "max_num_seqs": max_num_seqs,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "async_scheduling": False,
        "enable_chunked_prefill": False,
    }
    llm = LLM(str(model), dtype="float32", skip_tokenizer_init=True, enforce_eager=True, **options)
    # vLLM sets as many threads as there are cores, and then replaces torch's function by one that does nothing.
    torch.set_num_threads = set_num_threads
    set_num_threads(num_threads)

    async def generate(requests: Sequence[Request]) -> tuple[int, float]:
        # One request of vLLM for each sample, with the seeds that gcore's engine uses.
        each = [(r, seed) for r in requests for seed in sample_seeds(r.seed, np.arange(r.n)).tolist()]
        prompts: list[Any] = [TokensPrompt(prompt_token_ids=list(r.prompt_token_ids)) for r, _ in each]
        sampling = [
            SamplingParams(
                max_tokens=r.sampling.max_tokens,
                temperature=r.sampling.temperature,
                seed=seed >> 1,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                flat_logprobs=True,
            )
            for r, seed in each
        ]
        found: list[Any] = [output.outputs[0] for output in llm.generate(prompts, sampling, use_tqdm=False)]
        return sum(len(o.token_ids) for o in found), float(sum(sum(o.logprobs.logprobs) for o in found))

    return generate


def _transformers(folder: Path) -> Generate:
    """Load a model whose own `generate` makes one batch, padded on the left, that ends with its longest sample."""
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    async def generate(requests: Sequence[Request]) -> tuple[int, float]:
        rows = [torch.tensor(r.prompt_token_ids) for r in requests for _ in range(r.n)]
        lengths_B = torch.tensor([r.sampling.max_tokens for r in requests for _ in range(r.n)])
        input_ids_BP = pad_sequence(rows, batch_first=True, padding_side="left")
        mask_BP = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        num_prompt_tokens = input_ids_BP.shape[1]

        def has_ended(input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            # Each sample at its own length, as at an end-of-sequence token.
            return input_ids.shape[1] - num_prompt_tokens >= lengths_B

        torch.manual_seed(requests[0].seed)
        output = model.generate(
            input_ids_BP,
            attention_mask=mask_BP,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=int(lengths_B.max()),
            stopping_criteria=[has_ended],
            return_dict_in_generate=True,
            output_scores=True,
        )
        tokens_BT = output.sequences[:, num_prompt_tokens:]
        # The result of `compute_transition_scores`, but step by step, which takes a fraction of the time.
        steps = zip(output.scores, tokens_BT.unbind(1), strict=True)
        log_probs_BT = torch.cat([s.log_softmax(-1).gather(1, tokens_B[:, None]) for s, tokens_B in steps], dim=1)
        is_sampled_BT = torch.arange(log_probs_BT.shape[1]) < lengths_B[:, None]
        return int(is_sampled_BT.sum()), float(log_probs_BT[is_sampled_BT].sum())

    return generate
