"""Options of `gcore-bench rollout`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Self, get_args

from gcore_bench.grpo.errors import BenchError

PartName = Literal["generation", "sync", "forms", "sandbox"]
GenerationContender = Literal[
    "vllm", "gcore-vllm", "gcore-vllm-process", "transformers", "gcore-hf", "gcore-hf-process"
]


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Measure gcore-rollout beside bare vLLM, transformers' own generate, memcpy, files and a bare interpreter."""

    parts: tuple[PartName, ...] = get_args(PartName)
    """generation: tokens a second; sync: new weights, and the first token that they make; forms: what is sent of new
    weights in every form; sandbox: short programs."""
    contenders: tuple[GenerationContender, ...] = get_args(GenerationContender)
    """Who generates, in this order, in every round."""
    rounds: int = 3
    """How often everything is measured, in turn."""
    prompts: int = 8
    """Prompts of the generation."""
    n: int = 4
    """Samples a prompt, all of one length."""
    median_length: int = 48
    """Of the samples, in tokens; lengths are lognormal."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of lengths: the tail."""
    max_response_length: int = 256
    """Where samples are cut."""
    max_prompt_length: int = 96
    """Prompts have a third of it at least."""
    hidden_size: int = 256
    """Of the model that generates, which has four layers."""
    vocab_size: int = 4096
    """Of both models."""
    sync_mb: int = 256
    """About the size of the weights that are handed over, in MiB; one layer, of 34, is the least."""
    calls: int = 10
    """Sandboxed programs of a round, one after the other, and as many side by side."""
    threads: int = 1
    """Of torch, in each process."""
    seed: int = 0
    """Of lengths, prompts, samples and weights."""
    quick: bool = False
    """Everything once, at sizes that take no time: to see that it runs. The figures say nothing."""
    json: Path | None = None
    """File to write every figure to."""

    def __post_init__(self) -> None:
        lowest = dict.fromkeys(
            ("rounds", "prompts", "n", "median_length", "max_response_length", "sync_mb", "calls", "threads"), 1
        )
        lowest |= {"max_prompt_length": 3, "hidden_size": 128, "vocab_size": 16, "seed": 0}
        for name, least in lowest.items():
            if getattr(self, name) < least:
                raise BenchError(f"{name} is {getattr(self, name)}; expected {least} or more")
        for name in ("parts", "contenders"):
            if not getattr(self, name):
                raise BenchError(f"{name} is empty: at least one is needed")
        if not 0 <= self.sigma < 10:
            raise BenchError(f"sigma is {self.sigma}: a number in [0, 10) is needed")
        if self.hidden_size % 128:
            # Four heads, whose dimension vLLM's CPU attention takes in multiples of 32.
            raise BenchError(f"hidden_size is {self.hidden_size}: a multiple of 128 is needed")
        if self.json is not None and not self.json.absolute().parent.is_dir():
            raise BenchError(f"json is {self.json}: {self.json.absolute().parent} is no folder")

    def sized(self) -> Self:
        """With the sizes of ``quick``, if that was asked for."""
        if not self.quick:
            return self
        return replace(
            self,
            rounds=1,
            prompts=3,
            n=2,
            median_length=8,
            max_response_length=16,
            max_prompt_length=12,
            hidden_size=128,
            vocab_size=256,
            sync_mb=1,
            calls=2,
        )
