"""`gcore-llm train` on engines that do not have the trainer's weights."""

import gc
import sys
from pathlib import Path

import pytest
from command_line import Cli, option_set, step_rows

# The faults are those that the engines themselves are tested with.
sys.path.append(str(Path(__file__).parents[2] / "gcore_rollout"))
import faulty_engines  # pyright: ignore[reportMissingImports]
from engine_oracles import VLLM_IMPORT_WARNINGS  # pyright: ignore[reportMissingImports]
from rich.console import Console

from gcore_llm.cli import parse_train
from gcore_llm.training import train
from gcore_rollout import WrongWeightsError
from gcore_runs.loop.recorder import Display

pytestmark = [
    *VLLM_IMPORT_WARNINGS,
    # A run holds its folder's lock until its process ends.
    pytest.mark.filterwarnings("ignore:.*[.]lock:pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.parametrize("fault", faulty_engines.FAULTS)
@pytest.mark.parametrize("kind", ["hf", pytest.param("vllm", marks=pytest.mark.slow)])
def test_a_run_stops_within_the_step(
    kind: str, fault: str, own_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GCORE_TEST_FAULT", fault)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    engine = f"{faulty_engines.__file__}:make_{kind}"
    args = [
        *option_set(own_args, "--trainer.total-training-steps", "4"),
        "--rollout.engine",
        engine,
    ]
    args += ["--actor.lora-rank", "4"] if fault == "adapter" else []
    message = error_of(args[1:])
    # The run's folder is closed here, and not in the middle of another test.
    gc.collect()
    assert "engine 0 " in message
    assert faulty_engines.EXPECTED[fault] in message
    # The weights of the second step's end were the wrong ones: nothing was sampled by them.
    assert [row["step"] for row in step_rows(tmp_path / "runs/default")] == [1]


def error_of(args: list[str]) -> str:
    with pytest.raises(WrongWeightsError) as error:
        train(parse_train(args), Display(Console(quiet=True)))
    return str(error.value)


BLURRED = """
from gcore_rollout import HFEngine


def make(model, **options):
    engine = HFEngine.from_pretrained(model, **options)
    for module in engine._model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 100.0
    return engine
"""


@pytest.mark.slow
def test_what_the_weights_do_not_show(cli: Cli, own_args: list[str]) -> None:
    """An engine with the right weights and another forward: one line, once; and the curve in the report."""
    (cli.cwd / "blurred.py").write_text(BLURRED)
    four = option_set(own_args, "--trainer.total-training-steps", "4")
    out = cli.ok(*four, "--rollout.engine", "blurred.py:make")
    lines = [line for line in out.splitlines() if "disagree" in line]
    assert len(lines) == 1
    assert ": engine and trainer disagree on the policy by 0.0" in lines[0]
    assert lines[0].endswith(
        "algorithm.max_rollout_kl = 0.01: compare dtype, temperature and attention of both"
    )
    assert (
        sum(row["training/rollout_k3_kl"] > 0.01 for row in step_rows(cli.cwd / "runs/default")) > 1
    )
    assert "Engine-trainer mismatch" in (cli.cwd / "runs/default/report.html").read_text()
    assert "disagree" not in cli.ok(*own_args, "--name", "sound")
    refused = cli.refused(*own_args, "--algorithm.max-rollout-kl", "-1")
    assert "algorithm.max_rollout_kl is -1.0; expected a finite number, 0 or more" in " ".join(
        refused.split()
    )
