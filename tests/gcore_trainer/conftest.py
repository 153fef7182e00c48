"""Tiny models on disk, and one torch thread: two of them next to busy neighbours can be thirty times slower."""

import logging
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rank_pool import RankPool, RankServer, serving_ranks
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

# Importlib mode puts no test folder on the path, and `trainer_oracles` is shared by several files of this one.
sys.path.insert(0, str(Path(__file__).parent))

from trainer_oracles import SIZES, save_model

torch.set_num_threads(1)

CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, head_dim=24, tie_word_embeddings=False),
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model of each architecture, as a Hugging Face folder."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: save_model(config, root / name, seed=i)
        for i, (name, config) in enumerate(CONFIGS.items())
    }


@pytest.fixture(scope="session")
def qwen2(folders: dict[str, Path]) -> Path:
    return folders["qwen2"]


@pytest.fixture(scope="session")
def llama(folders: dict[str, Path]) -> Path:
    return folders["llama"]


@pytest.fixture(scope="session")
def verl() -> Any:
    """verl's algorithms. Their import needs one name of ray; what it does to the environment and the log is undone."""
    ray = ModuleType("ray")
    ray.__dict__["ObjectRef"] = object
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ray", ray)
        patch.setattr(os, "environ", os.environ.copy())
        patch.setattr(logging.root, "handlers", logging.root.handlers[:])
        patch.setattr(logging.root, "level", logging.root.level)
        return SimpleNamespace(
            algos=import_module("verl.trainer.ppo.core_algos"),
            helper=import_module("verl.trainer.ppo.rollout_corr_helper"),
            metrics=import_module("verl.trainer.ppo.metric_utils"),
            ActorConfig=import_module("verl.workers.config.actor").ActorConfig,
            PolicyLossConfig=import_module("verl.workers.config.actor").PolicyLossConfig,
        )


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    """Worlds of gloo ranks that run the functions of the files of cases."""
    with serving_ranks(*sorted(Path(__file__).parent.glob("*_cases.py"))) as server:
        yield server


@pytest.fixture
def ranks(rank_server: RankServer) -> RankPool:
    """A world of four ranks."""
    return rank_server.shared()
