"""The two workloads: the steps that every contender has to make."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gcore_bench.grpo import digit_reward

PROMPT_LENGTH = 4
"""Length of every prompt, in tokens, which are characters: ``7+8=``."""
MODEL, FLOOR = "model", "floor"
"""Names of the processes that make a workload's model and measure its physical limit."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One task at one size."""

    name: str
    description: str
    model: Literal["warmed_up", "long_tailed"]
    reward: str
    """Reward as in `gcore_llm`'s `TrainConfig.reward`; empty: the task's verifier."""
    max_response_length: int
    steps: int
    """Measured steps of a run."""
    train_batch_size: int = 32
    """Prompts a step."""
    n: int = 8
    """Responses a prompt."""
    trl_micro_batches: int = 1
    """Micro-batches into which TRL divides a step: the number that was fastest for it. gcore packs by tokens."""
    aim_over_trl: float = 0.0
    """Least speed of gcore over TRL's; 0: none is set."""

    @property
    def samples_per_step(self) -> int:
        """Completions of a step."""
        return self.train_batch_size * self.n


@dataclass(frozen=True, kw_only=True)
class Task:
    """The steps that a contender makes in one run."""

    contender: str
    workload: Workload
    model: Path
    steps: int
    threads: int
    seed: int
    lengths: Sequence[int] = ()
    """Lengths of the responses of a step, for the floor."""

    @property
    def uses_vllm(self) -> bool:
        """True if the contender generates by vLLM in its own process."""
        return self.contender.endswith("-vllm")


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="short",
            description="sums of two digits, answers of about 3 tokens",
            model="warmed_up",
            reward="",
            max_response_length=6,
            steps=30,
            aim_over_trl=3.3,
        ),
        Workload(
            name="long",
            description="long-tailed answers of up to 256 tokens",
            model="long_tailed",
            reward=f"{digit_reward.__file__}:share_of_even_digits",
            max_response_length=256,
            steps=6,
            trl_micro_batches=8,
        ),
    )
}
