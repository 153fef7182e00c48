"""The small runs of the part planner: some to fit its laws to, and others to predict."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import NormalDist
from typing import Any, Literal

import numpy as np

from gcore_placement import Job, Lengths, ModelShape

Kind = Literal["training", "generation", "step"]

_RANKS = {1: "1 process", 2: "2 ranks"}


@dataclass(frozen=True, kw_only=True)
class SmallRun:
    """One model and one batch."""

    name: str
    kind: Kind
    """training: a step of `TorchTrainer`; generation: of `HFEngine`; step: a whole one of `gcore-llm train`."""
    config: Mapping[str, Any]
    """The model's `config.json`."""
    prompts: tuple[int, ...]
    """Tokens of each."""
    responses: tuple[tuple[int, ...], ...]
    """Tokens of each response to each prompt; all of a prompt are alike where they are generated."""
    is_held_out: bool = True
    """Predicted by laws that are fitted to other runs."""
    max_tokens: int = 2048
    """Most tokens of a micro-batch."""
    gradient_checkpointing: bool = False
    ranks: int = 1
    """Ranks of FSDP, in training."""
    max_num_seqs: int = 256
    """Most sequences of the engine."""

    @cached_property
    def job(self) -> Job:
        """As the planner takes it; all numbers are float32."""
        return Job(
            policy=ModelShape.from_config(self.config),
            prompt_lengths=Lengths.recorded(self.prompts),
            response_lengths=Lengths.recorded(np.ravel(self.responses)),
            train_batch_size=len(self.prompts),
            n=len(self.responses[0]),
            compute_bytes=4,
        )


def small_runs(*, seed: int, quick: bool) -> list[SmallRun]:
    """Return the runs to fit to, and the held-out runs with other models, batches, lengths and limits."""
    make = partial(_made, np.random.default_rng(seed))
    return _quick_runs(make) if quick else _full_runs(make)


_LENGTHS: dict[Kind, dict[str, Any]] = {
    "training": {"n": 4, "prompt": 48, "median": 64, "sigma": 0.5, "longest": 128},
    "generation": {"n": 1, "prompt": 32, "median": 48, "sigma": 0.7, "longest": 96},
    # Random weights hardly ever end a response, so that all have as many tokens as they may.
    "step": {"prompt": 48, "sigma": 0.0},
}
"""Responses to a prompt, its most tokens, and those of responses, where a run does not say otherwise."""


def _made(
    rng: np.random.Generator, kind: Kind, name: str, config: dict[str, Any], *, prompts: int = 12, **options: Any
) -> SmallRun:
    options = _LENGTHS[kind] | options
    n, most, median, sigma, longest = (options.pop(key) for key in ("n", "prompt", "median", "sigma", "longest"))

    def long_tailed(count: int) -> list[int]:
        """The quantiles of a lognormal law, cut at the longest and shuffled, so that every batch has its tail."""
        normal = NormalDist()
        drawn = [median * np.exp(sigma * normal.inv_cdf((k + 0.5) / count)) for k in range(count)]
        return rng.permutation(np.clip(np.rint(drawn), 1, longest).astype(int)).tolist()

    lengths = tuple(rng.integers(most * 3 // 4, most + 1, prompts).tolist())
    if kind == "training":
        responses = tuple(tuple(long_tailed(n)) for _ in range(prompts))
    else:
        responses = tuple((length,) * n for length in long_tailed(prompts))
    return SmallRun(name=name, kind=kind, config=config, prompts=lengths, responses=responses, **options)


def _full_runs(make: Callable[..., SmallRun]) -> list[SmallRun]:
    fitted: list[SmallRun] = []
    for hidden_size in (256, 512):
        config = _config("qwen2", hidden_size)
        alike: dict[str, Any] = {"config": config, "sigma": 0.0, "is_held_out": False}
        train, generate = f"train {hidden_size}", f"generate {hidden_size}"
        for ranks in (1, 2):
            name, small = f"{train}, {_RANKS[ranks]}", f"{train}, {_RANKS[ranks]}, small micro-batches"
            fitted += [
                make("training", name, ranks=ranks, prompts=8, max_tokens=1280, **alike),
                make("training", small, ranks=ranks, prompts=4 * ranks, max_tokens=320, **alike),
            ]
        fitted += [
            make("training", f"{train}, long responses", prompts=2, n=2, median=500, longest=500, **alike),
            *(make("generation", f"{generate}, {count} responses", prompts=count, **alike) for count in (2, 8, 32)),
            make("generation", f"{generate}, long prompts", prompts=4, prompt=384, median=2, **alike),
        ]
    medium, huge = _config("qwen2", 384), _config("qwen2", 640)
    other = _config("llama", 320, layers=6, vocab_size=24_576)
    step = {"prompts": 8, "n": 4}
    return [
        *fitted,
        make("training", "train 384", medium),
        make("training", "train 640", huge, prompts=6),
        make("training", "train 384, long responses", medium, prompts=6, n=2, median=300, longest=600),
        make("training", "train 384, recomputed", medium, gradient_checkpointing=True),
        make("training", "train Llama 320, 6 layers, larger vocabulary", other),
        make("training", "train 384, 2 ranks", medium, ranks=2),
        make("training", "train 640, 2 ranks", huge, ranks=2),
        make("generation", "generate 384, 8 responses", medium, prompts=8),
        make("generation", "generate 640, 4 x 8 responses", huge, prompts=4, n=8),
        make("generation", "generate 384, long responses", medium, prompts=4, n=4, median=200, longest=384),
        make("generation", "generate 384, 48 responses, 16 at a time", medium, prompts=48, max_num_seqs=16),
        make("generation", "generate Llama 320, 6 layers, larger vocabulary", other, prompts=4, n=4),
        make("step", "gcore-llm train, Llama 384", _config("llama", 384), **step, median=64, longest=64),
        make("step", "gcore-llm train, Llama 512", _config("llama", 512), **step, median=96, longest=96),
    ]


def _quick_runs(make: Callable[..., SmallRun]) -> list[SmallRun]:
    runs: list[SmallRun] = []
    for hidden_size in (96, 192, 128):
        config = _config("qwen2", hidden_size, vocab_size=2048)
        few = {"config": config, "n": 2, "median": 24, "longest": 48, "is_held_out": hidden_size == 128}
        for ranks in (1, 2):
            name = f"train {hidden_size}, {_RANKS[ranks]}"
            runs.append(make("training", name, ranks=ranks, prompts=4, max_tokens=192, **few))
        runs += [
            make("generation", f"generate {hidden_size}, {prompts} x 2 responses", prompts=prompts, **few)
            for prompts in ((4,) if hidden_size == 128 else (1, 16))
        ]
    few = {"prompts": 2, "prompt": 128, "median": 2, "is_held_out": False}
    tiny = _config("llama", 128, vocab_size=2048)
    return [
        *runs,
        make("generation", "generate 192, long prompts", _config("qwen2", 192, vocab_size=2048), **few),
        make("step", "gcore-llm train", tiny, prompts=4, n=2, median=16, longest=16),
    ]


def _config(model_type: str, hidden_size: int, *, layers: int = 4, vocab_size: int = 8192) -> dict[str, Any]:
    """Return a Qwen2, whose embeddings are also the head, or a Llama, which has a head of its own."""
    return {
        "model_type": model_type,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden_size // 32,
        "num_key_value_heads": hidden_size // 32,
        "vocab_size": vocab_size,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": model_type == "qwen2",
        "bos_token_id": None,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
