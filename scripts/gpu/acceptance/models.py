"""Models with random weights in the shapes of Qwen2.5, what they are trained on, and the memory that is predicted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen2Config, Qwen3Config

from acceptance.trial import Trial
from gcore_placement import Efficiency, Job, Lengths, ModelShape, TrainingLayout
from gcore_placement.planning.layouts import TrainingLayouts
from gcore_placement.planning.memory import TrainingState, total, training_memory
from gcore_trainer import (
    OptimizerConfig,
    PackedModel,
    PolicyLossConfig,
    PolicyObjective,
    Sample,
    TorchTrainer,
)

Family = Literal["qwen2", "qwen3"]

VOCAB_SIZE = 151_936
GROUP_SIZE = 8
"""Responses to a prompt."""
_SIZES = {
    "0.5B": (896, 4864, 24, 14, 2),
    "1.5B": (1536, 8960, 28, 12, 2),
    "3B": (2048, 11_008, 36, 16, 2),
    "7B": (3584, 18_944, 28, 28, 4),
    "32B": (5120, 27_648, 64, 40, 8),
}
"""Hidden size, intermediate size, layers, heads and key-value heads of Qwen2.5."""
_SMALL = (64, 128, 2, 4, 2)
_OPTIMIZER = OptimizerConfig(lr=1e-6)


def model_config(trial: Trial, size: str, family: Family = "qwen2") -> PreTrainedConfig:
    """Return the configuration of a size, or, in a small run, of a tiny model."""
    hidden, intermediate, layers, heads, kv_heads = _SMALL if trial.is_small else _SIZES[size]
    settings: dict[str, Any] = {
        "vocab_size": vocab_size(trial),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": size in ("0.5B", "1.5B", "3B"),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return (
        Qwen2Config(**settings)
        if family == "qwen2"
        else Qwen3Config(head_dim=hidden // heads, **settings)
    )


def vocab_size(trial: Trial) -> int:
    """Return the size of the vocabulary."""
    return 512 if trial.is_small else VOCAB_SIZE


def compute_dtype(trial: Trial) -> torch.dtype:
    """Return the data type of passes."""
    return torch.bfloat16 if trial.device.startswith("cuda") else torch.float32


def model_folder(trial: Trial, size: str, family: Family = "qwen2") -> Path:
    """Return the folder of a model of this size; the first part that needs it writes it."""
    path = trial.work / f"{family}-{size}"
    if not path.is_dir():
        torch.manual_seed(0)
        with torch.device(trial.device):
            model: Any = AutoModelForCausalLM.from_config(model_config(trial, size, family))
        model = model.to(compute_dtype(trial))
        unfinished = path.with_suffix(".unfinished")
        model.save_pretrained(unfinished)
        unfinished.rename(path)
        del model
        if trial.device.startswith("cuda"):
            torch.cuda.empty_cache()
    return path


def load_packed(
    trial: Trial, size: str, *, gradient_checkpointing: bool, checkpointed_layers: float = 1.0
) -> PackedModel:
    """Load the model in training as gcore-llm does on this device."""
    return PackedModel.from_pretrained(
        model_folder(trial, size),
        device=trial.device,
        compute_dtype=compute_dtype(trial),
        gradient_checkpointing=gradient_checkpointing,
        checkpointed_layers=checkpointed_layers,
    )


def load_trainer(
    trial: Trial, size: str, *, gradient_checkpointing: bool, checkpointed_layers: float = 1.0
) -> TorchTrainer:
    """Load the model with its optimizer and the loss of GRPO."""
    packed = load_packed(
        trial,
        size,
        gradient_checkpointing=gradient_checkpointing,
        checkpointed_layers=checkpointed_layers,
    )
    return TorchTrainer(packed, optimizer=_OPTIMIZER, objective=PolicyObjective(PolicyLossConfig()))


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Lengths of prompts and their responses."""

    prompts: Sequence[int]
    responses: Sequence[Sequence[int]]

    @property
    def tokens(self) -> list[int]:
        """Tokens of each group, its prompt counted once."""
        return [
            prompt + sum(lengths)
            for prompt, lengths in zip(self.prompts, self.responses, strict=True)
        ]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and response together."""
        return max(
            prompt + max(lengths)
            for prompt, lengths in zip(self.prompts, self.responses, strict=True)
        )

    def flops(self, shape: ModelShape) -> list[float]:
        """Return the model FLOPs of a training pass over each group: see `TransformerWorkload.group_flops`."""
        pairs = zip(self.prompts, self.responses, strict=True)
        return [
            float(shape.workload.group_flops(prompt, list(lengths))) for prompt, lengths in pairs
        ]

    def samples(self, trial: Trial, *, seed: int) -> list[list[Sample]]:
        """Return the samples of each group, of random tokens, with advantages."""
        rng = np.random.default_rng(seed)
        samples_by_group: list[list[Sample]] = []
        for prompt_length, lengths in zip(self.prompts, self.responses, strict=True):
            prompt = rng.integers(0, vocab_size(trial), prompt_length)
            group = (rng.integers(0, vocab_size(trial), length) for length in lengths)
            samples = [Sample(prompt_ids=prompt, response_ids=response) for response in group]
            samples_by_group.append([replace(s, advantages=_advantages(rng, s)) for s in samples])
        return samples_by_group


def _advantages(rng: np.random.Generator, sample: Sample) -> Any:
    return np.full(sample.response_ids.size, rng.normal(), np.float32)


def equal_groups(trial: Trial, *, num: int, prompt: int = 512, response: int = 1024) -> Groups:
    """Return groups that are all alike; in a small run a sixteenth of the lengths."""
    if trial.is_small:
        prompt, response = prompt // 16, response // 16
    return Groups(prompts=[prompt] * num, responses=[[response] * GROUP_SIZE] * num)


def lognormal_groups(
    trial: Trial, *, num: int, median: float = 800.0, sigma: float = 0.8, seed: int = 0
) -> Groups:
    """Return groups whose responses have a long tail, at most five times the median."""
    rng, shrink = np.random.default_rng(seed), 16 if trial.is_small else 1
    prompts = rng.integers(128, 1025, num) // shrink
    lengths = (
        np.clip(median * np.exp(sigma * rng.normal(size=(num, GROUP_SIZE))), 16, 5 * median)
        / shrink
    )
    return Groups(prompts=prompts.tolist(), responses=np.ceil(lengths).astype(int).tolist())


def model_shape(trial: Trial, size: str) -> ModelShape:
    """Return the shape by which gcore-placement counts FLOPs and bytes."""
    return ModelShape.from_config(model_config(trial, size).to_dict())


def predicted_bytes(
    trial: Trial,
    size: str,
    groups: Groups,
    *,
    max_tokens: int,
    gradient_checkpointing: bool,
    share: float = 1.0,
) -> float:
    """Predict the peak bytes of the device in a step on these groups by gcore-placement's memory law.

    With gradient checkpointing, ``share`` is the share of the layers that are computed again.
    """
    longest = Lengths.recorded(np.concatenate([np.array(lengths) for lengths in groups.responses]))
    job = Job(
        policy=model_shape(trial, size),
        prompt_lengths=Lengths.recorded(np.array(groups.prompts)),
        response_lengths=longest,
        train_batch_size=len(groups.prompts),
        n=GROUP_SIZE,
        compute_bytes=compute_dtype(trial).itemsize,
    )
    sizes = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
    }
    layout = TrainingLayout(
        backend="torch",
        **sizes,
        data_parallel_size=1,
        gradient_checkpointing=gradient_checkpointing,
        ppo_max_token_len=max(max_tokens, groups.longest),
    )
    state = TrainingState(checkpointed_share=share)
    parts = training_memory(
        job, TrainingLayouts(layout), activations=Efficiency().activations, state=state
    )
    return float(total(parts)[0])
