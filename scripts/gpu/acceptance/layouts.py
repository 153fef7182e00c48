"""Layouts of several ranks on one device, against one rank: what part 14 compares, as each rank computes it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from acceptance.trial import Trial
from gcore_trainer import (
    OptimizerConfig,
    PackedModel,
    ParallelConfig,
    Sample,
    SFTObjective,
    TorchParallel,
    TorchTrainer,
)

_NUM_STEPS = 2
"""The second loss depends on the first update."""
_MICRO_BATCH = 2
_OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3)
"""With an epsilon above most gradients, an update is proportional to its gradient, and rounding does not flip signs."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks that train a model together."""

    name: str
    size: int
    backend: str = "torch"
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    model: str = "dense"

    @property
    def reference(self) -> "Layout":
        """One rank of the same backend with the same model."""
        name = f"{self.backend}, {self.model}"
        return Layout(name=name, size=1, backend=self.backend, model=self.model)


def _megatron(name: str, size: int, *, model: str = "dense", **sizes: Any) -> Layout:
    parallel = ParallelConfig(**sizes)
    return Layout(name=name, size=size, backend="megatron", parallel=parallel, model=model)


_TP: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
_PP: dict[str, Any] = {"pipeline_model_parallel_size": 2}
_EP: dict[str, Any] = {"expert_model_parallel_size": 2}
FSDP2 = Layout(name="FSDP2", size=2)
LAYOUTS = (
    FSDP2,
    Layout(name="FSDP2", size=4),
    Layout(name="HSDP", size=4, parallel=ParallelConfig(fsdp_size=2)),
    Layout(
        name="Ulysses",
        size=2,
        parallel=ParallelConfig(context_parallel_size=2, ulysses_sequence_parallel_size=2),
    ),
    Layout(name="ring", size=2, parallel=ParallelConfig(context_parallel_size=2)),
    Layout(
        name="ring x Ulysses",
        size=4,
        parallel=ParallelConfig(context_parallel_size=4, ulysses_sequence_parallel_size=2),
    ),
    _megatron("Megatron TP", 2, **_TP),
    _megatron("Megatron PP", 2, **_PP),
    _megatron("Megatron EP", 2, model="moe", **_EP),
    _megatron("Megatron TP x PP", 4, **_TP, **_PP),
    _megatron("Megatron TP x EP x PP", 4, model="moe", **_TP, **_EP, **_PP),
)


def dtypes(trial: Trial) -> list[torch.dtype]:
    """Return the data types in which layouts are compared."""
    if trial.device == "cuda":
        return [torch.float32, torch.bfloat16]
    return [torch.float32]


def write_models(trial: Trial) -> None:
    """Write a dense model and one with experts, whose next-token distributions are not flat."""
    sizes: dict[str, Any] = {
        "vocab_size": 512 if trial.is_small else 8192,
        "hidden_size": 64 if trial.is_small else 512,
        "intermediate_size": 128 if trial.is_small else 1024,
        "num_hidden_layers": 2 if trial.is_small else 4,
        "num_attention_heads": 4 if trial.is_small else 8,
        "num_key_value_heads": 2 if trial.is_small else 4,
        "head_dim": 16 if trial.is_small else 64,
        "initializer_range": 0.06,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    width = {"moe_intermediate_size": sizes["intermediate_size"] // 2}
    configs = {
        "dense": Qwen3Config(**sizes),
        "moe": Qwen3MoeConfig(**sizes, **experts, **width),
    }
    for name, config in configs.items():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(_folder(trial, name))


def _folder(trial: Trial, model: str) -> Path:
    return trial.work / f"layouts-{model}"


def make_trainer(trial: Trial, layout: Layout, dtype: torch.dtype) -> Any:
    """Return this rank's trainer."""
    folder = _folder(trial, layout.model)
    options: dict[str, Any] = {"optimizer": _OPTIMIZER, "objective": SFTObjective()}
    device = torch.device("cuda", 0) if trial.device == "cuda" else torch.device("cpu")
    if layout.backend == "megatron":
        # An image may lack Megatron-Core.
        from gcore_trainer import MegatronTrainer

        return MegatronTrainer(
            folder, parallel=layout.parallel, dtype=dtype, device=device, **options
        )
    is_sharded = layout.size > 1
    packed = PackedModel.from_pretrained(
        folder, device=str(device), compute_dtype=dtype, sharded=is_sharded
    )
    parallel = None
    if is_sharded:
        parallel = TorchParallel.join(layout.parallel, device_type=device.type)
    return TorchTrainer(packed, parallel=parallel, **options)


def micro_batches(trial: Trial, step: int) -> list[list[Sample]]:
    """Return a step's micro-batches, of all replicas together."""
    rng = np.random.default_rng(step)
    shortest, longest = (4, 24) if trial.is_small else (32, 256)
    vocab_size = 512 if trial.is_small else 8192
    samples: list[Sample] = []
    for _ in range(8 if trial.is_small else 16):
        prompt = rng.integers(0, vocab_size, rng.integers(shortest, longest))
        response = rng.integers(0, vocab_size, rng.integers(shortest, longest))
        samples.append(Sample(prompt_ids=prompt, response_ids=response))
    return [samples[i : i + _MICRO_BATCH] for i in range(0, len(samples), _MICRO_BATCH)]


def train_step(trial: Trial, trainer: Any, step: int) -> dict[str, float]:
    """Train on this replica's micro-batches of a step; return its metrics."""
    rank = trainer.data_parallel_rank
    return trainer.train_step(micro_batches(trial, step)[rank :: trainer.data_parallel_size])


def train(trial: Trial, layout: Layout) -> dict[str, dict[str, float]]:
    """Train in each data type; write the results of one rank, return how far those of several are from them.

    Returns:
        largest differences by data type: of the loss in nats, of the gradient norm as a share of it, and of weights.
    """
    differences: dict[str, dict[str, float]] = {}
    for dtype in dtypes(trial):
        name = str(dtype).removeprefix("torch.")
        trainer = make_trainer(trial, layout, dtype)
        metrics = [train_step(trial, trainer, step) for step in range(_NUM_STEPS)]
        results = {
            "loss": torch.tensor([step["sft/loss"] for step in metrics], dtype=torch.float64),
            "norm": torch.tensor([step["actor/grad_norm"] for step in metrics]),
            "weights": {name: w.float().cpu() for name, w in trainer.export_weights()},
        }
        path = trial.work / f"one-rank-{layout.backend}-{layout.model}-{name}.pt"
        if layout.size == 1:
            torch.save(results, path)
        else:
            differences[name] = _differences(results, torch.load(path))
        del trainer
    return differences


def _differences(results: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    weights = [
        _largest(weight, results["weights"][name]) for name, weight in reference["weights"].items()
    ]
    return {
        "loss": _largest(results["loss"], reference["loss"]),
        "norm": _largest(results["norm"] / reference["norm"], torch.ones(_NUM_STEPS)),
        # Unlike Python's, it is NaN if one of them is.
        "weights": float(torch.tensor(weights).max()),
    }


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())
