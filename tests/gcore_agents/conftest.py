"""Tiny models on disk, as in the tests of gcore-rollout."""

import sys
from pathlib import Path

import pytest
import torch

# Importlib mode puts no test folder on the path, and files of two are shared.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "gcore_rollout"))

from engine_oracles import TinyModel, make_tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model(tmp_path_factory.mktemp("tied"), tie=True)
