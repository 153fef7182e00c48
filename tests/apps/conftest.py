"""The command line in processes of its own, and tiny runs for it."""

from pathlib import Path

import pytest
from command_line import Cli, Server
from tiny_jobs import make_chatty_model, own_job

from gcore_llm.tiny_model import make_tiny_model


@pytest.fixture
def cli(server: Server, tmp_path: Path) -> Cli:
    return Cli(server, tmp_path)


@pytest.fixture
def vllm_cli(vllm_server: Server, tmp_path: Path) -> Cli:
    """For runs with engines of vLLM."""
    return Cli(vllm_server, tmp_path)


@pytest.fixture(scope="module")
def shared_cli(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """For runs that several tests of a file look at."""
    return Cli(server, tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model as it is before its warm-up."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(path, seed=0)
    return path


@pytest.fixture(scope="session")
def chatty(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that ends its responses at any digit: their lengths have a long tail."""
    path = tmp_path_factory.mktemp("chatty") / "model"
    make_chatty_model(path, tiny=tiny)
    return path


@pytest.fixture(scope="session")
def own_args(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A job of two steps on the user's own model, forty prompts and a reward in a file: about a second."""
    return own_job(tmp_path_factory.mktemp("own"), tiny)
