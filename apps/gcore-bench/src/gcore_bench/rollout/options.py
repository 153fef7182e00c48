"""Options of `gcore-bench rollout`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_args

from gcore_bench.harness.options import Count, NonNegative, QuickOptions, Sigma, at_least, multiple_of

PartName = Literal["generation", "sync", "forms", "sandbox"]
GenerationContender = Literal[
    "vllm",
    "gcore-vllm",
    "gcore-vllm-process",
    "transformers",
    "gcore-hf",
    "gcore-hf-process",
    "gcore-hf-dynamic",
    "gcore-hf-static",
]


@dataclass(frozen=True, kw_only=True)
class RolloutOptions(QuickOptions):
    """Measure gcore-rollout against bare vLLM, transformers' own generate, memcpy, files and a bare interpreter."""

    parts: tuple[PartName, ...] = get_args(PartName)
    """generation: tokens a second; sync: new weights, and the first token that they make; forms: bytes and seconds of
    new weights in every form; sandbox: short programs."""
    contenders: tuple[GenerationContender, ...] = get_args(GenerationContender)
    """Contenders of the part generation, in the order in which they run in every round."""
    prompts: Count = 8
    """Prompts of the generation."""
    n: Count = 4
    """Samples of each prompt, all of one length."""
    median_length: Count = 48
    """Median length of the samples, in tokens; lengths are lognormal."""
    sigma: Sigma = 1.0
    """Standard deviation of the logarithm of lengths."""
    max_response_length: Count = 256
    """Length at which samples are truncated."""
    max_prompt_length: Annotated[int, at_least(3)] = 96
    """Length of the longest prompts; the shortest have a third of it."""
    # Four heads, whose dimension vLLM's CPU attention takes in multiples of 32.
    hidden_size: Annotated[int, at_least(128), multiple_of(128)] = 256
    """Hidden size of the model that generates, which has four layers."""
    vocab_size: Annotated[int, at_least(16)] = 4096
    """Vocabulary of both models."""
    sync_mb: Count = 256
    """Approximate size of the weights that are updated, in MiB; the least is one layer, of 34."""
    calls: Count = 10
    """Sandboxed programs of a round, one after the other, and as many concurrently."""
    threads: Count = 1
    """Threads of torch in each process."""
    seed: NonNegative = 0
    """Seed of lengths, prompts, samples and weights."""

    QUICK: ClassVar[Mapping[str, Any]] = {
        "rounds": 1,
        "prompts": 3,
        "n": 2,
        "median_length": 8,
        "max_response_length": 16,
        "max_prompt_length": 12,
        "hidden_size": 128,
        "vocab_size": 256,
        "sync_mb": 2,
        "calls": 2,
    }
