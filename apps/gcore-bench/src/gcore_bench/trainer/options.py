"""Options of `gcore-bench trainer`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from gcore_bench.grpo.errors import BenchError

PartName = Literal["step", "tokens", "balance", "log-probs", "context", "mfu"]
StepContender = Literal["trl", "verl", "gcore-padded", "gcore-packed", "gcore-shared"]
CUDA_PARTS: tuple[PartName, ...] = ("log-probs", "mfu")


@dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """Measure gcore-trainer beside TRL's and verl's trainer-side code, alternating, each in processes of its own."""

    parts: tuple[PartName, ...] = ("step", "tokens", "balance", "log-probs", "context")
    """step: a policy-gradient step; tokens: those computed and needed; balance: the step on two FSDP ranks;
    log-probs: their memory and time; context: long sequences on several ranks; mfu: a larger model on a GPU."""
    contenders: tuple[StepContender, ...] = get_args(StepContender)
    """Who makes the step, in this order, in every round."""
    rounds: int = 2
    """How often each contender runs."""
    steps: int = 2
    """Measured steps of a run."""
    prompts: int = 8
    """Prompts of the step."""
    n: int = 4
    """Responses a prompt."""
    median_length: int = 48
    """Of responses, in tokens; lengths are lognormal."""
    sigma: float = 1.0
    """Standard deviation of the logarithm of response lengths: the tail."""
    max_response_length: int = 384
    """Where responses are cut."""
    max_prompt_length: int = 96
    """Prompts have a third of it at least."""
    max_tokens: int = 2048
    """Of a packed micro-batch."""
    padded_micro_batches: int = 4
    """In how many parts padded contenders take the step's responses."""
    hidden_size: int = 128
    """Of the model, which has four layers in the step and two in context."""
    vocab_size: int = 8192
    """Of the step's model."""
    vocab_sizes: tuple[int, ...] = (32_000, 151_936)
    """Vocabularies whose log-probabilities are computed."""
    logits_mb: float = 512.0
    """Size of all their logits in float32, in MiB; with the vocabulary it gives the number of tokens."""
    lengths: tuple[int, ...] = (1024, 4096, 16_384)
    """Of the sequences that context-parallel ranks divide, in tokens."""
    context_sizes: tuple[int, ...] = (1, 2, 4)
    """Ranks that divide them; a power of 2 up to 8."""
    threads: int = 1
    """Threads of each process."""
    seed: int = 0
    """Of lengths, tokens and weights."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the work is done: cuda has the parts log-probs and mfu, cpu all but mfu."""
    json: Path | None = None
    """File to write every figure to."""

    def __post_init__(self) -> None:
        lowest = dict.fromkeys(
            ("rounds", "steps", "prompts", "median_length", "padded_micro_batches", "threads", "vocab_size"), 1
        )
        lowest |= {"n": 2, "max_response_length": 2, "max_prompt_length": 3, "hidden_size": 32, "seed": 0}
        for name, least in lowest.items():
            if getattr(self, name) < least:
                raise BenchError(f"{name} is {getattr(self, name)}; expected {least} or more")
        for name in ("parts", "contenders", "vocab_sizes", "lengths", "context_sizes"):
            if not getattr(self, name):
                raise BenchError(f"{name} is empty: at least one is needed")
        for name, least in (("vocab_sizes", 2), ("lengths", 32)):
            if min(getattr(self, name)) < least:
                raise BenchError(f"{name} holds {min(getattr(self, name))}; expected {least} or more")
        if not 0 <= self.sigma < 10:
            raise BenchError(f"sigma is {self.sigma}: a number in [0, 10) is needed")
        if not self.logits_mb > 0:
            raise BenchError(f"logits_mb is {self.logits_mb}: above 0 is needed")
        if self.hidden_size % 32:
            raise BenchError(f"hidden_size is {self.hidden_size}: a multiple of 32 is needed")
        if unfit := [size for size in self.context_sizes if size not in (1, 2, 4, 8)]:
            raise BenchError(f"context_sizes holds {unfit[0]}: 1, 2, 4 or 8 is needed")
        if self.max_tokens < (longest := self.max_prompt_length + self.max_response_length):
            raise BenchError(f"max_tokens is {self.max_tokens}: the longest sample needs {longest}")
        if self.padded_micro_batches > self.prompts * self.n:
            raise BenchError(
                f"padded_micro_batches is {self.padded_micro_batches}: there are {self.prompts * self.n} responses"
            )
        known = CUDA_PARTS if self.device == "cuda" else [p for p in get_args(PartName) if p != "mfu"]
        if unfit := [part for part in self.parts if part not in known]:
            raise BenchError(f"parts holds {unfit[0]}: device {self.device} has {', '.join(known)}")
        if self.json is not None and not self.json.absolute().parent.is_dir():
            raise BenchError(f"json is {self.json}: {self.json.absolute().parent} is no folder")
