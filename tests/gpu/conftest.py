"""Each test has a device: the CPU, which proves the test itself, and CUDA, which is what it is for.

`scripts/gpu/accept` runs those on CUDA; `pytest -m gpu tests/gpu` does on a machine with a GPU.
"""

import sys
from pathlib import Path

import pytest
import torch

# Importlib mode puts no test folder on the path, and `gpu_cases` is shared by the files of this one.
sys.path.insert(0, str(Path(__file__).parent))

from gpu_cases import MODELS, ON_CUDA, save_model

torch.set_num_threads(1)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=ON_CUDA)])
def device(request: pytest.FixtureRequest) -> str:
    """A device; for tests that are cheap on a CPU."""
    return request.param


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny random models with grouped queries, windows and sinks, as Hugging Face folders."""
    root = tmp_path_factory.mktemp("models")
    return {name: save_model(config, root / name) for name, config in MODELS.items()}
