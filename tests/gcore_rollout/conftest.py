"""Tiny models with sharp distributions, and what transformers says about them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import Qwen2Config, Qwen2ForCausalLM

from gcore_rollout import Completion, Engine, Request

VOCAB_SIZE = 96
EOS_TOKEN_IDS = [1, 5]
MAX_LENGTH = 512

type_of_log_probs = Callable[..., NDArray[np.float32]]


@dataclass(frozen=True)
class TinyModel:
    """Two sets of weights of one architecture, ``old`` and ``new``; the folder holds ``old``."""

    path: Path
    old: Any
    new: Any


def _make(path: Path, *, tie: bool) -> TinyModel:
    # 32 is the smallest head dimension that vLLM's CPU attention takes.
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=EOS_TOKEN_IDS,
        attn_implementation="eager",
    )
    models: list[Any] = []
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        model: Any = Qwen2ForCausalLM(config).eval().requires_grad_(False)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Larger than the usual 0.02: a flat distribution would hide a wrong weight or a wrong temperature.
            parameter.copy_(0.1 * noise if parameter.dim() == 2 else parameter + 0.1 * noise)
        models.append(model)
    old, new = models
    old.save_pretrained(path)
    return TinyModel(path, old, new)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return _make(tmp_path_factory.mktemp("tied"), tie=True)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return _make(tmp_path_factory.mktemp("untied"), tie=False)
