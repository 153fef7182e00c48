"""Every file of `examples/` runs, and does what it says."""

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from command_line import Cli, step_rows
from forks import FORK

from gcore_llm import TrainConfig, train
from gcore_llm.cli import parse_train
from gcore_trainer import PolicyLossConfig, PolicyTokens, ScoredGroup, get_advantage_estimator

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = (
    "checkpoints",
    "count_shapes",
    "my_advantage",
    "my_loop",
    "my_loss",
    "simulator",
    "tool_agent",
)
COMMANDS = {"tool_agent": "uv run gcore-llm train --rollout.agent.run examples/tool_agent.py:agent"}
"""Commands of examples that are no programs; `test_the_example_learns` of `test_agents.py` runs this one."""


WARM = """
import runpy
import sys
from dataclasses import replace

import gcore_llm

recipe = replace(gcore_llm.embedded(), model=sys.argv[1])
gcore_llm.embedded = lambda: recipe
runpy.run_path(sys.argv[2], run_name="__main__")
"""
"""Runs an example with the embedded model after its warm-up, which the example would make first."""

FEW_STEPS = """
import runpy
import sys

runpy.run_path(sys.argv[1])["main"](num_steps=60)
"""
"""Runs an example for fewer steps than it has by itself."""


def run(name: str, folder: Path, *program: str) -> str:
    """Return what an example prints, run by a program if there is one; it may leave nothing behind."""
    warnings = ("-W", "error::DeprecationWarning:__main__")
    command = [sys.executable, *FORK, *warnings, *program, EXAMPLES / f"{name}.py"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(folder.iterdir()) == []
    return done.stdout


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def accuracies(printed: str) -> list[tuple[float, float]]:
    """Before and after."""
    found = re.findall(r"/mean: (\S+) before, (\S+) after", printed)
    return [(float(before), float(after)) for before, after in found]


def test_there_are_these_examples() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == list(NAMES)
    assert all(
        f"(examples/{name}.py)" in (EXAMPLES.parent / "README.md").read_text() for name in NAMES
    )


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short_and_imports_roots(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 100
    tree = ast.parse(text)
    command = COMMANDS.get(name, f"uv run python examples/{name}.py")
    assert command in (ast.get_docstring(tree) or "")
    modules = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    modules += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    assert any(module.startswith("gcore_") for module in modules)
    assert [module for module in modules if module.startswith("gcore_") and "." in module] == []


def check_loop(printed: str) -> None:
    """The policy learns to sample even tokens, of which a random one samples half."""
    shares = [float(share) for share in re.findall(r"even tokens (\S+)", printed)]
    assert len(shares) == 20
    assert shares[0] < 0.6
    assert min(shares[-3:]) > 0.9


def check_checkpoints(printed: str) -> None:
    assert "killed by signal 9" in printed
    assert re.search(r"^resumed at step (10|15)$", printed, flags=re.MULTILINE)
    assert re.findall(r"(?:interruption|same): (\w+)", printed) == ["True", "True"]
    assert "loaded alone: ['model'], (64, 64)" in printed


def check_simulator(printed: str) -> None:
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines()[1:]}
    assert list(rows) == ["colocated", "split", "dynamic", "clairvoyant"]
    step_s = {name: float(row[0]) for name, row in rows.items()}
    assert step_s["clairvoyant"] <= step_s["dynamic"] < step_s["split"] < step_s["colocated"]


@pytest.mark.slow
@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("name", "check"),
    [("my_loop", check_loop), ("checkpoints", check_checkpoints), ("simulator", check_simulator)],
)
def test_a_quick_example_runs(name: str, check: Callable[[str], None], tmp_path: Path) -> None:
    check(run(name, tmp_path))


@pytest.fixture(scope="module")
def warm_model(shared_cli: Cli) -> Path:
    """The embedded model after its warm-up."""
    steps = ("--trainer.total-training-steps", "1", "--data.train-batch-size", "4")
    sizes = ("--threads", "1", "--device", "cpu", "--task.num-val", "16")
    shared_cli.ok("train", "--name", "warm", *sizes, *steps)
    return shared_cli.cwd / "runs/warm/model"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["my_loss", "my_advantage"])
def test_an_example_that_trains_learns(name: str, warm_model: Path, tmp_path: Path) -> None:
    printed = run(name, tmp_path, "-c", WARM, str(warm_model))
    (greedy_before, greedy_after), (before, after) = accuracies(printed)
    assert greedy_after > greedy_before
    assert after > before


@pytest.mark.slow
def test_a_model_learns_to_count(tmp_path: Path) -> None:
    [(before, after)] = accuracies(run("count_shapes", tmp_path, "-c", FEW_STEPS))
    assert before < 0.35, "one of five numbers is right"
    assert after > max(0.4, before + 0.15)


def small(own_args: list[str], folder: Path) -> TrainConfig:
    """Two steps on a tiny random model."""
    return replace(parse_train(own_args[1:]), runs_dir=str(folder))


def test_my_loss(own_args: list[str], tmp_path: Path) -> None:
    example = load("my_loss")
    rng = np.random.default_rng(0)
    log_probs, old, advantages = rng.normal(size=(3, 50)).astype(np.float32)
    tokens = PolicyTokens(
        log_probs=torch.from_numpy(log_probs),
        old_log_probs=torch.from_numpy(old),
        advantages=torch.from_numpy(advantages),
        mask=torch.ones(50, dtype=torch.bool),
        lengths=[50],
    )
    ratio = np.exp(log_probs - old)
    expected = [
        -a * min(r, 1.28) if a > 0 else -a * r / 2 for a, r in zip(advantages, ratio, strict=True)
    ]
    np.testing.assert_allclose(
        example.halved_negatives(tokens, PolicyLossConfig()), expected, rtol=1e-5
    )
    result = train(example.with_my_loss(small(own_args, tmp_path)))
    assert all(row["actor/grad_norm"] > 0 for row in step_rows(result.run))


def test_my_advantage(own_args: list[str], tmp_path: Path) -> None:
    example = load("my_advantage")
    config = example.with_my_advantage(small(own_args, tmp_path))
    estimator = get_advantage_estimator(config.algorithm.adv_estimator)
    rewards = [np.array([0.0, score]) for score in (3.0, 1.0, 1.0, -100.0)]
    group = ScoredGroup(rewards=rewards, masks=[np.ones(2, np.bool_)] * 4)
    advantages, returns = estimator(group)
    assert [a.tolist() for a in advantages] == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0], [-1.0, -1.0]]
    assert returns is None
    result = train(config)
    rows = step_rows(result.run)
    assert all(
        -1 <= row["critic/advantages/min"] < 0 < row["critic/advantages/max"] <= 1 for row in rows
    )
