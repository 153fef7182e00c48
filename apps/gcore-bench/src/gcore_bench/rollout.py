"""`gcore-bench rollout`: generation and new weights under gcore-rollout, in turn with its peers and a copy in memory.

Every contender of the part generation has a new process in every round, forked from a server that has imported vLLM and
transformers once, in which it is warmed up before it is measured.
Shapes: B samples, T tokens of the longest, P tokens of the longest prompt.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, get_args

import numpy as np

from gcore_bench.harness.processes import (
    Spec,
    cpu_seconds,
    draw_length,
    make_model,
    run_processes,
    start_server,
    stderr_to,
    timed,
)
from gcore_bench.harness.report import (
    BenchError,
    BenchOptions,
    BenchSession,
    Figures,
    Rounds,
    add_ratios,
)
from gcore_rollout import Engine, EngineProcess, Request, SamplingParams, engine_kind
from gcore_runs import Count, NonNegative

if TYPE_CHECKING:
    import torch

PartName = Literal["generation", "sync"]
GenerationContender = Literal[
    "vllm", "gcore-vllm", "gcore-vllm-process", "transformers", "gcore-hf", "gcore-hf-process"
]
Generate = Callable[[Sequence[Request]], Awaitable[tuple[int, float]]]
"""Generates completions, and returns the number of their tokens and the sum of their log-probabilities."""
State = dict[str, "torch.Tensor"]

MEMCPY = "memcpy"
"""The contender of the part sync that copies the weights in memory: a physical limit."""
_ENVIRONMENT = {
    # Settings of VLLMEngine, for bare vLLM too: one process, no telemetry, eager on a CPU.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_COMPILE_DISABLE": "1",
}
_ROWS = 1024
_WIDTH = 512
_RANK = 16
_DELTAS = {
    "delta 0.1 %": 0.001,
    "delta 1 %": 0.01,
    "delta 10 %": 0.1,
}
"""Forms of changed elements, and their fraction."""
_COLUMNS: dict[str, dict[str, str]] = {
    "generation": {
        "tokens/s": "tokens_per_s ,.0f",
        "speed over base": "tokens_per_s_ratio x",
        "s": "wall_s .2f",
        "CPU s": "cpu_s .2f",
        "CPU over base": "cpu_s_ratio x",
        "tokens": "tokens ,.0f",
        "mean log-prob": "log_prob .4f",
    },
    "sync": {
        "sent MB": "sent_bytes MB",
        "to encode s": "encode_s .3f",
        "to apply s": "apply_s .3f",
        "both over memcpy": "wall_s_ratio x",
    },
}
_NOTES = {
    "generation": "generation: each prompt has its own length of samples, log-probabilities on. vllm has VLLMEngine's "
    "settings and seeds; transformers pads to the longest. -process: called from another process, whose CPU seconds "
    "count.",
    "sync": "sync: bfloat16 weights; apply: until the mirror has copied them into an engine's memory. Deltas: by "
    "fraction of changed elements. adapters: of rank 16 on every matrix.",
}
"""Lines without which the figures of a part cannot be judged."""


@dataclass(frozen=True, kw_only=True)
class RolloutOptions(BenchOptions):
    """Measure gcore-rollout against bare vLLM, transformers' own generate and a copy in memory."""

    parts: tuple[PartName, ...] = get_args(PartName)
    """generation: tokens a second; sync: bytes and seconds of new weights, in each form of weight sync."""
    contenders: tuple[GenerationContender, ...] = get_args(GenerationContender)
    """Contenders of the part generation, in the order in which they run in every round."""
    prompts: Count = 8
    """Prompts of the generation."""
    n: Count = 4
    """Samples of each prompt, all of one length; lengths are lognormal around 48 tokens."""
    max_response_length: Count = 256
    """Length at which samples are truncated."""
    max_prompt_length: Count = 96
    """Length of the longest prompts; the shortest have a third of it."""
    vocab_size: Count = 4096
    """Vocabulary of the model."""
    sync_mb: Count = 256
    """Size of the weights that are updated, in MiB."""
    threads: Count = 1
    """Threads of torch in each process."""
    seed: NonNegative = 0
    """Seed of lengths, prompts, samples and weights."""

    QUICK: ClassVar[Mapping[str, Any]] = {
        "rounds": 1,
        "prompts": 3,
        "n": 2,
        "max_response_length": 16,
        "max_prompt_length": 12,
        "vocab_size": 256,
        "sync_mb": 2,
    }


def run(options: RolloutOptions, session: BenchSession) -> None:
    """Measure and print the figures that ``options`` asks for.

    Raises:
        BenchError: a contender failed, or contenders did not do the same work.
    """
    with stderr_to(session.folder / "log"):
        for part in options.parts:
            rounds = session.start_rounds(part)
            if part == "generation":
                measure_generation(options, session.folder, rounds)
            else:
                asyncio.run(measure_sync(options, rounds))
            rows = rounds.summarise()
            for name, row in rows.items():
                base = base_of(name) if part == "generation" else MEMCPY
                add_ratios({name: row}, rounds.runs, base, "wall_s", "tokens_per_s", "cpu_s")
            session.report(part, _COLUMNS[part], rows, rounds.runs, lines=[_NOTES[part]])


def base_of(contender: str) -> str:
    """Return the contender that one of the part generation is compared with."""
    return "vllm" if "vllm" in contender else "transformers"


def make_requests(options: RolloutOptions) -> list[Request]:
    """Make prompts with long-tailed lengths of samples, which all samples reach: there is no end-of-sequence token."""
    rng = np.random.default_rng(options.seed)
    requests: list[Request] = []
    longest = options.max_prompt_length
    for number in range(options.prompts):
        prompt = rng.integers(1, options.vocab_size, rng.integers(-(-longest // 3), longest + 1))
        length = draw_length(rng, 48, options.max_response_length)
        request = Request(
            request_id=f"prompt-{number}",
            prompt_token_ids=tuple(prompt.tolist()),
            sampling=SamplingParams(max_tokens=length),
            n=options.n,
            seed=options.seed + number,
        )
        requests.append(request)
    return requests


def count_tokens(requests: Sequence[Request]) -> int:
    """Return the number of tokens of all samples."""
    return sum(request.n * request.sampling.max_tokens for request in requests)


def measure_generation(options: RolloutOptions, folder: Path, rounds: Rounds) -> None:
    """Let all contenders take turns, in which all must make the same number of tokens."""
    make_model(
        folder / "model",
        hidden_size=256,
        layers=4,
        heads=4,
        vocab_size=options.vocab_size,
        max_length=options.max_prompt_length + options.max_response_length,
        seed=options.seed,
    )
    preload = ["transformers.models.qwen2.modeling_qwen2"]
    if any("vllm" in name for name in options.contenders):
        preload += [*engine_kind("vllm").preload, "vllm.entrypoints.llm"]
    start_server(options.threads, preload=preload, **_ENVIRONMENT)
    expected = count_tokens(make_requests(options))
    for turn in rounds.turns(options.contenders):
        spec = Spec(
            work="gcore_bench.rollout:measure",
            contender=turn.contender,
            folder=folder,
            options=options,
            threads=options.threads,
        )
        figures = run_processes([spec])
        if figures["tokens"] != expected:
            raise BenchError(
                f"{turn.contender} made {figures['tokens']:.0f} tokens; the samples have {expected}"
            )
        turn.done(figures, "{tokens_per_s:,.0f} tokens/s")


def measure(spec: Spec) -> Figures:
    """Return the figures of a contender, in its process."""
    return asyncio.run(_measure(spec, spec.options))


async def _measure(spec: Spec, options: RolloutOptions) -> Figures:
    """Load a contender, warm it up and measure it; for ``-process`` the CPU seconds are those of both processes."""
    name = spec.contender
    model = spec.folder / "model"
    max_num_seqs = options.prompts * options.n
    pids = [os.getpid()]
    async with AsyncExitStack() as stack:
        if name == "vllm":
            generate = _make_vllm(model, max_num_seqs)
        elif name == "transformers":
            generate = _make_transformers(model)
        else:
            kind = engine_kind(name.split("-")[1])
            load = kind.load().from_pretrained
            factory = partial(
                load,
                model,
                max_num_seqs=max_num_seqs,
                eos_token_ids=[],
            )
            if name.endswith("-process"):
                start: Any = EngineProcess.start
                engine = await start(factory, num_threads=options.threads, preload=kind.preload)
                pids.append(engine.pid)
            else:
                engine = factory()
            stack.push_async_callback(engine.close)
            generate = partial(collect, engine)
        length = min(options.max_response_length, 4)
        await generate(make_requests(replace(options, max_response_length=length)))
        return await measure_generate(generate, make_requests(options), pids)


async def measure_generate(
    generate: Generate, requests: Sequence[Request], pids: Sequence[int]
) -> Figures:
    """Generate, and return the figures by the names that tables use; CPU seconds are of the processes ``pids``."""
    start_cpu_s = cpu_seconds(pids)
    with timed() as figures:
        tokens, log_prob_sum = await generate(requests)
    figures["cpu_s"] = cpu_seconds(pids) - start_cpu_s
    figures["tokens"] = float(tokens)
    figures["tokens_per_s"] = tokens / figures["wall_s"]
    figures["log_prob"] = log_prob_sum / tokens
    return figures


async def collect(engine: Engine, requests: Sequence[Request]) -> tuple[int, float]:
    """Generate with an engine of gcore; see `Generate`."""
    num_tokens = 0
    log_prob_sum = 0.0
    async for completion in engine.generate(requests):
        num_tokens += completion.token_ids.size
        log_prob_sum += float(completion.log_probs.sum())
    return num_tokens, log_prob_sum


def _make_vllm(model: Path, max_num_seqs: int) -> Generate:
    """Load bare vLLM with the settings of `VLLMEngine`."""
    import torch
    from vllm import LLM, SamplingParams as VLLMSamplingParams
    from vllm.inputs import TokensPrompt

    from gcore_rollout import sample_seeds

    set_num_threads = torch.set_num_threads
    num_threads = torch.get_num_threads()
    llm = LLM(
        str(model),
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=None if torch.cuda.is_available() else 1 << 30,
        max_num_seqs=max_num_seqs,
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        async_scheduling=False,
        enable_chunked_prefill=False,
    )
    # vLLM sets as many threads as there are cores, and then replaces torch's function by one that does nothing.
    torch.set_num_threads = set_num_threads
    set_num_threads(num_threads)

    async def generate(requests: Sequence[Request]) -> tuple[int, float]:
        # One request of vLLM for each sample, with the seeds that gcore's engine uses.
        prompts: list[Any] = []
        sampling: list[Any] = []
        for request in requests:
            for seed in sample_seeds(request.seed, np.arange(request.n)).tolist():
                params = VLLMSamplingParams(
                    max_tokens=request.sampling.max_tokens,
                    temperature=request.sampling.temperature,
                    seed=seed >> 1,
                    ignore_eos=True,
                    detokenize=False,
                    logprobs=0,
                    flat_logprobs=True,
                )
                prompts.append(TokensPrompt(prompt_token_ids=list(request.prompt_token_ids)))
                sampling.append(params)
        outputs: list[Any] = llm.generate(prompts, sampling, use_tqdm=False)
        num_tokens = 0
        log_prob_sum = 0.0
        for output in outputs:
            num_tokens += len(output.outputs[0].token_ids)
            log_prob_sum += sum(output.outputs[0].logprobs.logprobs)
        return num_tokens, log_prob_sum

    return generate


def _make_transformers(folder: Path) -> Generate:
    """Load a model whose own `generate` makes one batch, padded on the left, that ends with its longest sample."""
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    async def generate(requests: Sequence[Request]) -> tuple[int, float]:
        rows: list[torch.Tensor] = []
        lengths: list[int] = []
        for request in requests:
            rows.extend([torch.tensor(request.prompt_token_ids)] * request.n)
            lengths.extend([request.sampling.max_tokens] * request.n)
        lengths_B = torch.tensor(lengths)
        input_ids_BP = pad_sequence(rows, batch_first=True, padding_side="left")
        # No prompt has the token 0.
        mask_BP = input_ids_BP != 0
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
            max_new_tokens=max(lengths),
            stopping_criteria=[has_ended],
            return_dict_in_generate=True,
            output_scores=True,
        )
        tokens_BT = output.sequences[:, num_prompt_tokens:]
        log_prob_sum = 0.0
        for step, scores_BV in enumerate(output.scores):
            log_probs_B = scores_BV.log_softmax(-1).gather(1, tokens_BT[:, step, None])[:, 0]
            log_prob_sum += float(log_probs_B[lengths_B > step].sum())
        return sum(lengths), log_prob_sum

    return generate


def _copy(target: State, weights: "Iterable[tuple[str, torch.Tensor]]") -> None:
    for name, tensor in weights:
        target[name].copy_(tensor)


class WeightSink:
    """The part of an engine that an update needs: it copies the weights into its own. It has a mirror."""

    def __init__(self, state: State) -> None:
        from gcore_rollout.weight_sync.updates import WeightMirror

        self.weight_version = 0
        self.weights = deepcopy(state)
        self.mirror = WeightMirror(cast(Engine, self), state.items())

    async def update_weights(
        self, weights: "Iterable[tuple[str, torch.Tensor]]", *, version: int
    ) -> None:
        """Copy the weights."""
        _copy(self.weights, weights)
        self.weight_version = version


async def measure_sync(options: RolloutOptions, rounds: Rounds) -> None:
    """Send new bfloat16 weights in each form, in turn with a copy; the engine must then have those weights."""
    import torch

    from gcore_rollout.weight_sync.updates import (
        A_OF,
        B_OF,
        AdapterWeights,
        FullWeights,
        WeightDelta,
        make_delta,
        merge_adapters,
    )

    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(options.seed)

    def draw(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(0.02).bfloat16()

    state = {f"layers.{number}.weight": draw(_ROWS, _WIDTH) for number in range(options.sync_mb)}
    sink = WeightSink(state)
    target = deepcopy(state)
    for version, turn in enumerate(rounds.turns((MEMCPY, "full", *_DELTAS, "adapters")), start=1):
        name = turn.contender
        versions = {"base_version": sink.weight_version, "version": version}
        old = state
        adapters: State = {}
        if name in _DELTAS:
            state = {key: _flip(tensor, _DELTAS[name], generator) for key, tensor in old.items()}
        elif name == "adapters":
            for key in state:
                adapters[key.removesuffix(".weight") + A_OF] = draw(_RANK, _WIDTH)
                adapters[key.removesuffix(".weight") + B_OF] = draw(_ROWS, _RANK)
        update: FullWeights | WeightDelta | AdapterWeights | None = None
        with timed() as encode:
            if name == "full":
                update = FullWeights(version=version, tensors=state.items())
            elif adapters:
                update = AdapterWeights(scaling=2.0, tensors=adapters, **versions)
            elif name in _DELTAS:
                update = make_delta(old, state.items(), **versions)
        with timed() as apply:
            if update is None:
                _copy(target, state.items())
            else:
                await sink.mirror.apply(update)
        expected = state
        if isinstance(update, AdapterWeights):
            expected = dict(merge_adapters(state, update))
        for key, tensor in expected.items():
            if update is not None and not torch.equal(sink.weights[key], tensor):
                raise BenchError(
                    f"sync: {name}: an engine has other weights than those that were sent"
                )
        figures = {"encode_s": encode["wall_s"], "apply_s": apply["wall_s"]}
        figures["wall_s"] = sum(figures.values())
        figures["sent_bytes"] = options.sync_mb * 2.0**20
        if isinstance(update, WeightDelta | AdapterWeights):
            figures["sent_bytes"] = float(update.size_bytes)
        turn.done(figures, "{wall_s:.3f} s")


def _flip(tensor: "torch.Tensor", fraction: float, generator: "torch.Generator") -> "torch.Tensor":
    """Return a tensor in which this fraction of elements has the other sign."""
    import torch

    return torch.where(torch.rand(tensor.shape, generator=generator) < fraction, -tensor, tensor)
