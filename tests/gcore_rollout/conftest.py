"""Tiny models on disk."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

# Importlib mode puts no test folder on the path, and `engine_oracles` is shared by several files of this one.
sys.path.insert(0, str(Path(__file__).parent))

from engine_oracles import TinyModel, make_tiny_mixture, make_tiny_model
from tiny_pipelines import word_tokenizer

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("tied"), tie=True)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("untied"), tie=False)


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.fixture(scope="session")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a CLIP model with random weights, of images of 32 pixels."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    path = tmp_path_factory.mktemp("clip")
    tokenizer = word_tokenizer(path / "words")
    size: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    ends = {
        "bos_token_id": len(tokenizer) - 2,
        "eos_token_id": len(tokenizer) - 1,
        "pad_token_id": len(tokenizer) - 1,
    }
    torch.manual_seed(0)
    config = CLIPConfig(
        text_config={**size, **ends, "vocab_size": len(tokenizer), "max_position_embeddings": 8},
        vision_config={**size, "image_size": 32, "patch_size": 8},
        projection_dim=12,
    )
    CLIPModel(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    side = {"height": 32, "width": 32}
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=side).save_pretrained(path)
    return path
