"""Tiny models on disk."""

import sys
from pathlib import Path

import pytest
import torch

# Importlib mode puts no test folder on the path, and `engine_oracles` is shared by several files of this one.
sys.path.insert(0, str(Path(__file__).parent))

from engine_oracles import TinyModel, make_tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("tied"), tie=True)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("untied"), tie=False)
