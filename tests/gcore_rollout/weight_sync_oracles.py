"""A real trainer, and whether an engine runs the weights that it has."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from engine_oracles import VOCAB_SIZE, Found, collect, make_request

from gcore_rollout import Engine, Request
from gcore_trainer import (
    LoRAConfig,
    OptimizerConfig,
    PackedModel,
    PolicyLossConfig,
    PolicyObjective,
    Sample,
    TorchTrainer,
    Trainer,
)

LORA = LoRAConfig(rank=4, alpha=8)
TOLERANCE = 1e-4
REQUESTS = (make_request("shared", 300, n=3, max_tokens=12), make_request("r", 7, max_tokens=20))
"""The first prompt fills whole blocks, which an engine may cache."""


def make_trainer(
    path: Path,
    *,
    lora: LoRAConfig | None = None,
    dtype: torch.dtype = torch.float32,
    lr: float = 1e-2,
) -> TorchTrainer:
    packed = PackedModel.from_pretrained(path, lora=lora, dtype=dtype)
    return TorchTrainer(
        packed, optimizer=OptimizerConfig(lr=lr), objective=PolicyObjective(PolicyLossConfig())
    )


def training_samples(*, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        Sample(
            prompt_ids=rng.integers(0, VOCAB_SIZE, 5),
            response_ids=rng.integers(0, VOCAB_SIZE, 9),
            advantages=np.full(9, advantage, np.float32),
        )
        for advantage in (1.0, -0.5)
    ]


def train(trainer: Trainer, *, seed: int = 0) -> None:
    """One real optimizer step."""
    metrics = trainer.train_step([training_samples(seed=seed)])
    assert metrics["actor/grad_norm"] > 0


def adapters_of(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    """What the trainer's optimizer changes: A and B, by peft's names."""
    return trainer.state()["model"]


def as_samples(found: Found, requests: Iterable[Request] = REQUESTS) -> list[Sample]:
    """Completions as a trainer takes them."""
    prompts = {r.request_id: np.array(r.prompt_token_ids) for r in requests}
    return [
        Sample(prompt_ids=prompts[c.request_id], response_ids=c.token_ids) for c in found.values()
    ]


def difference(found: Found, log_probs: Sequence[np.ndarray]) -> float:
    """The largest one between log-probs of completions and those that a trainer gives."""
    pairs = zip(found.values(), log_probs, strict=True)
    return max(float(np.abs(c.log_probs - expected).max()) for c, expected in pairs)


async def deviation(engine: Engine, trainer: Trainer) -> float:
    """The same for completions made now, which all carry the engine's version; always of the same prompts."""
    found = await collect(engine, *REQUESTS)
    versions = {version for c in found.values() for version in c.weight_versions.tolist()}
    assert versions == {engine.weight_version}
    [log_probs] = trainer.log_probs([as_samples(found)])
    return difference(found, log_probs)


async def check_synced(engine: Engine, trainer: Trainer, *, version: int) -> None:
    """The engine samples with the trainer's weights, and says of which version they are."""
    assert engine.weight_version == version
    assert await deviation(engine, trainer) < TOLERANCE


async def check_behind(engine: Engine, trainer: Trainer) -> None:
    """The engine has other weights, so that `check_synced` would fail; what it can cache of the prompts, it has."""
    assert await deviation(engine, trainer) > 100 * TOLERANCE
