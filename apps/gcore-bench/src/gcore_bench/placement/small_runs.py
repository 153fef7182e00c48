"""The small runs of the part planner: some to fit its laws to, and others to predict.

`data/small_runs.csv` has one line per run. Training runs make a step of `TorchTrainer` in one process or on two FSDP
ranks, generation runs use `HFEngine`, and "step" is a whole step of `gcore-llm train`. Held-out runs have models,
batches, lengths and limits that no fitted run has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from scipy.special import ndtri

from gcore_bench.placement.tables import read_rows
from gcore_placement import Job, Lengths, ModelShape


@dataclass(frozen=True, kw_only=True)
class SmallRun:
    """One model and one batch."""

    name: str
    stage: Literal["training", "generation", "step"]
    is_held_out: bool
    """Predicted by laws that are fitted to other runs."""
    config: Mapping[str, Any]
    """The model's `config.json`."""
    prompts: Sequence[int]
    """Tokens of each prompt."""
    responses: Sequence[Sequence[int]]
    """Tokens of each response to each prompt; responses to one prompt are equally long if they are generated."""
    ranks: int
    """FSDP ranks in training."""
    max_tokens: int
    """Most tokens of a micro-batch."""
    gradient_checkpointing: bool
    max_num_seqs: int
    """Most sequences of the engine."""

    @cached_property
    def job(self) -> Job:
        """The job as the planner takes it; all numbers are float32."""
        return Job(
            policy=ModelShape.from_config(self.config),
            prompt_lengths=Lengths.recorded(self.prompts),
            response_lengths=Lengths.recorded(np.ravel(self.responses)),
            train_batch_size=len(self.prompts),
            n=len(self.responses[0]),
            compute_bytes=4,
        )


def make_small_runs(*, seed: int, quick: bool) -> list[SmallRun]:
    """Return the runs to fit to and the held-out runs; if ``quick``, a few tiny ones."""
    rng = np.random.default_rng(seed)
    size = "quick" if quick else "full"
    return [_make_run(row, rng) for row in read_rows("small_runs.csv") if row["size"] == size]


def _make_run(row: Mapping[str, Any], rng: np.random.Generator) -> SmallRun:
    """Draw the lengths of a run, and return it."""
    num_prompts = row["prompts"]
    longest_prompt = row["longest_prompt"]
    prompts = rng.integers(longest_prompt * 3 // 4, longest_prompt + 1, num_prompts)
    responses: list[list[int]] = []
    if row["stage"] == "training":
        responses += [_draw_lengths(row, row["n"], rng) for _ in range(num_prompts)]
    else:
        responses += [[length] * row["n"] for length in _draw_lengths(row, num_prompts, rng)]
    return SmallRun(
        name=row["name"],
        stage=row["stage"],
        is_held_out=row["is_held_out"],
        config=_make_config(row),
        prompts=prompts.tolist(),
        responses=responses,
        ranks=row["ranks"],
        max_tokens=row["max_tokens"],
        gradient_checkpointing=row["gradient_checkpointing"],
        max_num_seqs=row["max_num_seqs"],
    )


def _draw_lengths(row: Mapping[str, Any], count: int, rng: np.random.Generator) -> list[int]:
    """Return the quantiles of a lognormal law, cut at the longest and shuffled, so that every batch has its tail."""
    quantiles = ndtri((np.arange(count) + 0.5) / count)
    lengths = np.rint(row["median"] * np.exp(row["sigma"] * quantiles))
    return rng.permutation(lengths.clip(1, row["longest"]).astype(int)).tolist()


def _make_config(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Qwen2, whose embeddings are also the head, or a Llama, which has a head of its own."""
    hidden_size = row["hidden_size"]
    return {
        "model_type": row["model_type"],
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": row["layers"],
        "num_attention_heads": hidden_size // 32,
        "num_key_value_heads": hidden_size // 32,
        "vocab_size": row["vocab_size"],
        "max_position_embeddings": 2048,
        "tie_word_embeddings": row["model_type"] == "qwen2",
        "bos_token_id": None,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
