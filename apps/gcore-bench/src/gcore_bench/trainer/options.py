"""Options of `gcore-bench trainer`."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from gcore_bench.harness.options import (
    BenchError,
    BenchOptions,
    Count,
    NonNegative,
    Sigma,
    above,
    at_least,
    multiple_of,
)
from gcore_runs import Bound

PartName = Literal["step", "tokens", "balance", "log-probs", "context", "memory", "mfu"]
StepContender = Literal["trl", "verl", "gcore-padded", "gcore-packed", "gcore-masks", "gcore-shared"]
CUDA_PARTS: tuple[PartName, ...] = ("log-probs", "mfu")

_RANKS = Bound(lambda size: size in (1, 2, 4, 8), "1, 2, 4 or 8")


@dataclass(frozen=True, kw_only=True)
class TrainerOptions(BenchOptions):
    """Measure gcore-trainer against TRL's and verl's trainer code, in turn, each in processes of its own."""

    parts: tuple[PartName, ...] = ("step", "tokens", "balance", "log-probs", "context", "memory")
    """step: a policy-gradient step; tokens: those computed and needed; balance: the step on two FSDP ranks;
    log-probs: their memory and time; context: long sequences on several ranks;
    memory: long responses to one prompt, without masks and with them; mfu: a larger model on a GPU."""
    contenders: tuple[StepContender, ...] = get_args(StepContender)
    """Contenders of the part step, in the order in which they run."""
    rounds: Count = 2
    """Number of rounds, in each of which every contender runs once."""
    steps: Count = 2
    """Measured steps of a run."""
    prompts: Count = 8
    """Prompts of the step."""
    n: Annotated[int, at_least(2)] = 4
    """Responses to each prompt."""
    median_length: Count = 48
    """Median length of responses, in tokens; lengths are lognormal."""
    sigma: Sigma = 1.0
    """Standard deviation of the logarithm of response lengths."""
    max_response_length: Annotated[int, at_least(2)] = 384
    """Length at which responses are truncated."""
    max_prompt_length: Annotated[int, at_least(3)] = 96
    """Length of the longest prompts; the shortest have a third of it."""
    max_tokens: int = 2048
    """Tokens of a packed micro-batch, at most."""
    padded_micro_batches: Count = 4
    """Micro-batches into which padded contenders divide the step's responses."""
    hidden_size: Annotated[int, at_least(32), multiple_of(32)] = 128
    """Hidden size of the model, which has four layers in the step and two in context."""
    vocab_size: Count = 8192
    """Vocabulary of the step's model."""
    vocab_sizes: tuple[Annotated[int, at_least(2)], ...] = (32_000, 151_936)
    """Vocabularies whose log-probabilities are computed."""
    logits_mb: Annotated[float, above(0)] = 512.0
    """Size of all their logits in float32, in MiB; with the vocabulary it gives the number of tokens."""
    lengths: tuple[Annotated[int, at_least(32)], ...] = (1024, 4096, 16_384)
    """Lengths of the sequences that context-parallel ranks divide, in tokens."""
    context_sizes: tuple[Annotated[int, _RANKS], ...] = (1, 2, 4)
    """Numbers of ranks that divide them; powers of 2 up to 8."""
    shared_lengths: tuple[Annotated[int, at_least(32)], ...] = (512, 1024, 2048, 4096, 8192)
    """Lengths of the eight responses to one prompt in the part memory, each twice the one before."""
    max_lognormal_length: Annotated[int, at_least(64)] = 4096
    """Length at which eight responses of lognormal lengths, with a quarter of it as their median, are truncated."""
    max_mask_gb: Annotated[float, above(0)] = 1.0
    """Largest mask, in 10^9 bytes, with which the part memory is measured; it grows with the square of the length."""
    threads: Count = 1
    """Threads of each process."""
    seed: NonNegative = 0
    """Seed of lengths, tokens and weights."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device that does the work: cuda has the parts log-probs and mfu, cpu all but mfu."""

    def __post_init__(self) -> None:
        super().__post_init__()
        longest, responses = self.max_prompt_length + self.max_response_length, self.prompts * self.n
        if self.max_tokens < longest:
            raise BenchError(f"max_tokens is {self.max_tokens}; expected at least {longest}, the longest sample")
        if self.padded_micro_batches > responses:
            raise BenchError(
                f"padded_micro_batches is {self.padded_micro_batches}; expected at most {responses}, one a response"
            )
        known = CUDA_PARTS if self.device == "cuda" else [part for part in get_args(PartName) if part != "mfu"]
        if wrong := [part for part in self.parts if part not in known]:
            raise BenchError(f"parts holds {wrong[0]}; expected {', '.join(known)} on device {self.device}")
