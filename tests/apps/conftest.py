"""The command line in processes of its own, and tiny runs for it."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Importlib mode puts no test folder on the path, and `command_line` is shared by several files of this one.
sys.path.insert(0, str(Path(__file__).parent))

from command_line import Cli, Server, served, write_rows

from gcore_llm.tiny_model import make_tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served("gcore_llm", tmp_path_factory.mktemp("logs")) as server:
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
    shutil.copytree(tiny, path)
    digits = tiny_tokenizer()("0123456789")["input_ids"]
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, *digits]}))
    return path


EVENS = '''
def reward(prompt, completion, row):
    """The share of characters with an even code: even a random model has groups that differ."""
    return sum(ord(c) % 2 == 0 for c in completion) / max(len(completion), 1)
'''


@pytest.fixture(scope="session")
def own_args(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A job of two steps on the user's own model, forty prompts and a reward in a file: about a second."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "evens.py").write_text(EVENS)
    write_rows(folder / "train.jsonl", ({"prompt": f"{i}+{i % 7}=", "answer": i + i % 7} for i in range(40)))
    return [
        *("train", "--threads", "1", "--device", "cpu", "--model", str(tiny)),
        *("--data.train-files", str(folder / "train.jsonl"), "--reward", f"{folder / 'evens.py'}:reward"),
        *("--data.train-batch-size", "8", "--rollout.n", "4", "--data.max-response-length", "8"),
        *("--data.max-prompt-length", "64", "--actor.optim.lr", "1e-3", "--trainer.total-training-steps", "2"),
    ]
