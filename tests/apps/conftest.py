"""The command line in processes of its own, and tiny runs for it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Cli, Server, served
from forks import SOCKET
from tiny_jobs import make_chatty_model, own_job

from gcore_llm.tiny_model import make_tiny_model


@pytest.fixture(scope="session", autouse=True)
def forks(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Heavy processes are forks of `server`, once that has started."""
    os.environ[SOCKET] = str(tmp_path_factory.mktemp("forks") / "gcore_llm")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served("gcore_llm", tmp_path_factory.mktemp("logs")) as server:
        yield server


@pytest.fixture(scope="session")
def diffusion_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served("gcore_diffusion", tmp_path_factory.mktemp("diffusion-logs")) as server:
        yield server


@pytest.fixture
def cli(server: Server, tmp_path: Path) -> Cli:
    return Cli(server, tmp_path)


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
