"""`gcore-llm train` on engines that do not have the trainer's weights."""

import gc
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path

import pytest
import torch
from command_line import Cli, option_set, step_rows, write_rows

# The faults are those that the engines themselves are tested with.
sys.path.append(str(Path(__file__).parents[2] / "gcore_rollout"))
import faulty_engines  # pyright: ignore[reportMissingImports]
from engine_oracles import (  # pyright: ignore[reportMissingImports]
    VLLM_IMPORT_WARNINGS,
    make_tiny_mixture,
)
from rich.console import Console
from safetensors.torch import load_file, save_file

from gcore_llm.cli import parse_train
from gcore_llm.learning.comparison import DISTRIBUTION_KL, K3
from gcore_llm.training import train
from gcore_rollout import WrongWeightsError
from gcore_runs.loop.recorder import Display
from gcore_trainer import TorchTrainer

pytestmark = [
    *VLLM_IMPORT_WARNINGS,
    # A run holds its folder's lock until its process ends.
    pytest.mark.filterwarnings("ignore:.*[.]lock:pytest.PytestUnraisableExceptionWarning"),
]


KINDS = ["hf", pytest.param("vllm", marks=pytest.mark.slow)]


FourSteps = Callable[..., str]
"""Runs four steps with an engine of this kind and fault, and with further options; returns what the screen shows."""


@pytest.fixture
def four_steps(own_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FourSteps:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")

    def run(kind: str, fault: str, *options: str) -> str:
        monkeypatch.setenv("GCORE_TEST_FAULT", fault)
        args = option_set(own_args, "--trainer.total-training-steps", "4")[1:]
        args += ["--rollout.engine", f"{faulty_engines.__file__}:make_{kind}"]
        for name, value in zip(options[::2], options[1::2], strict=True):
            args = option_set(args, name, value) if name in args else [*args, name, value]
        screen = StringIO()
        try:
            train(parse_train(args), Display(Console(file=screen, width=1000)))
        finally:
            # The run's folder is closed here, and not in the middle of another test.
            gc.collect()
        return screen.getvalue()

    return run


@pytest.mark.parametrize("fault", [*faulty_engines.FAULTS, "expert", "undelivered"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_stops_within_the_step(
    kind: str, fault: str, four_steps: FourSteps, tmp_path: Path, tiny: Path
) -> None:
    options: list[str] = []
    if fault in ("adapter", "undelivered"):
        options = ["--actor.lora-rank", "4"]
    if fault == "expert":
        make_tiny_mixture(tmp_path / "mixture", vocab_size=128)
        for file in tiny.glob("token*"):
            shutil.copy(file, tmp_path / "mixture")
        options = ["--model", str(tmp_path / "mixture")]
    with pytest.raises(WrongWeightsError, match="engine 0 ") as error:
        four_steps(kind, fault, *options)
    assert faulty_engines.EXPECTED[fault] in str(error.value)
    # The weights of the step's end were the wrong ones: nothing was sampled by them.
    num_steps = 0 if fault == "undelivered" else 1
    assert len(step_rows(tmp_path / "runs/default")) == num_steps


@pytest.mark.parametrize("kind", KINDS)
def test_samples_by_another_version_than_the_batch_trains(
    kind: str, four_steps: FourSteps, tmp_path: Path
) -> None:
    """By their label: it stays 0."""
    with pytest.raises(RuntimeError, match="by weights of version 0; expected only version 1"):
        four_steps(kind, "label")
    assert [row["step"] for row in step_rows(tmp_path / "runs/default")] == [1]


LONG = ("--data.max-prompt-length", "512")
FAST = ("--actor.optim.lr", "3e-2")
IN_TURNS = ("--rollout.colocated", "True")
UNSEEN = {
    # Prompts of more than a block of cached keys and values, the same at every step.
    ("vllm", "cache"): (2, (*LONG, *FAST)),
    ("hf", "temperature"): (1, ("--rollout.temperature", "0.5")),
    ("vllm", "temperature"): (1, ("--rollout.temperature", "0.5")),
    ("vllm", "raw log-probs"): (1, ("--rollout.temperature", "0.5")),
    ("hf", "blind undelivered"): (2, ("--actor.lora-rank", "4", *FAST)),
    ("vllm", "blind undelivered"): (2, ("--actor.lora-rank", "4", *FAST)),
    ("hf", "blind late"): (2, FAST),
    ("vllm", "blind late"): (2, FAST),
    # TRL#5312: after each update the engine wakes, and loads the weights of the model's folder.
    ("hf", "reloaded"): (2, (*IN_TURNS, *FAST)),
    ("vllm", "reloaded"): (2, (*IN_TURNS, *FAST)),
}
"""Faults that weights do not show, or engines that do not report them: at which step they are seen, and options."""


def check_log_probs(screen: str, run: Path, *, step: int) -> None:
    """All four steps are made, and both measures and the screen show a fault from ``step`` on, not earlier."""
    rows = step_rows(run)
    assert len(rows) == 4
    for name, least in ((K3, 0.01), (DISTRIBUTION_KL, 0.001)):
        values = [row[name] for row in rows[:step]]
        assert max(values[:-1], default=0.0) < 1e-5
        assert values[-1] > least
    assert f"step {step}: engine and trainer disagree on the policy" in screen


@pytest.mark.parametrize(
    ("kind", "fault"),
    [pytest.param(*key, marks=pytest.mark.slow if key[0] == "vllm" else ()) for key in UNSEEN],
)
def test_what_the_log_probs_show(
    kind: str, fault: str, four_steps: FourSteps, tmp_path: Path
) -> None:
    """At the first step at which the fault has an effect, by both measures, and on the screen."""
    step, options = UNSEEN[kind, fault]
    long = [{"prompt": f"{'9' * 300}{i}+{i % 7}=", "answer": i + i % 7} for i in range(12)]
    write_rows(tmp_path / "long.jsonl", long)
    if fault == "cache":
        options += ("--data.train-files", str(tmp_path / "long.jsonl"))
    check_log_probs(four_steps(kind, fault, *options), tmp_path / "runs/default", step=step)


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_that_reuses_what_an_earlier_one_has_found(
    kind: str, four_steps: FourSteps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SkyRL#1345: digests are of the tensors that are published, and agree with them; log-probs show it at step 2."""
    export_weights = TorchTrainer.export_weights
    num_exports = 0

    def export_by_stale_names(trainer: TorchTrainer) -> Iterator[tuple[str, torch.Tensor]]:
        """Since the first export, the two layers have changed places."""
        nonlocal num_exports
        num_exports += 1
        tensors = dict(export_weights(trainer))
        swapped = {"0": "1", "1": "0"}
        for name in tensors:
            source = name
            if num_exports > 1:
                source = re.sub(r"(?<=layers[.])[01]", lambda match: swapped[match[0]], name)
            yield name, tensors[source]

    monkeypatch.setattr(TorchTrainer, "export_weights", export_by_stale_names)
    check_log_probs(four_steps(kind, "", *FAST), tmp_path / "runs/default", step=2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tail_that_the_engine_does_not_draw(
    kind: str, four_steps: FourSteps, tmp_path: Path, tiny: Path
) -> None:
    """The estimate by sampled tokens is blind to it, because all of them are among those that are drawn."""
    sharp = tmp_path / "sharp"
    shutil.copytree(tiny, sharp)
    weights = load_file(sharp / "model.safetensors")
    weights["model.norm.weight"] *= 10
    save_file(weights, sharp / "model.safetensors", metadata={"format": "pt"})
    screen = four_steps(kind, "truncated", "--model", str(sharp))
    rows = step_rows(tmp_path / "runs/default")
    assert rows[0][K3] < 0.01 < rows[0][DISTRIBUTION_KL]
    assert f"nats per position ({DISTRIBUTION_KL})" in screen


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
