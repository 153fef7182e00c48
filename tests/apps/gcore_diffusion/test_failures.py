"""Runs that are interrupted at any stage, or lose a process, and then have the metrics of undisturbed ones."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import (
    Cli,
    Command,
    Finished,
    Server,
    kill_a_rank,
    read_rows,
    step_rows,
    write_rows,
)
from process_tree import grandchildren
from tiny_pipelines import flow_pipeline

from gcore_ckpt import Checkpointer

pytestmark = pytest.mark.slow

NUM_STEPS = 6
CLOCKS = ("timing_s/", "perf/throughput", "perf/generated", "perf/resident_gb/", "ledger/")


@pytest.fixture(scope="module")
def cli(diffusion_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    return Cli(diffusion_server, tmp_path_factory.mktemp("failures"))


@pytest.fixture(scope="module")
def args(cli: Cli) -> list[str]:
    """Six steps with an average of the weights, a reward that is not trained on, and a checkpoint of every one."""
    flow_pipeline(cli.cwd)
    (cli.cwd / "rewards.py").write_text(
        "def red(images, prompts, rows):\n    return images[..., 0].mean((1, 2)) / 255\n\n\n"
        "def dark(images, prompts, rows):\n    return -images.mean((1, 2, 3)) / 255\n"
    )
    write_rows(
        cli.cwd / "train.jsonl", ({"prompt": f"{word} {i}"} for i in range(10) for word in "abc")
    )
    return [
        *(
            "train",
            "--threads",
            "1",
            "--device",
            "cpu",
            "--model",
            "flow",
            "--data.train-files",
            "train.jsonl",
        ),
        *(
            "--reward.kind",
            "rewards.py:red",
            "--reward.held-out",
            "rewards.py:dark",
            "--actor.ema-decay",
            "0.9",
        ),
        *("--data.train-batch-size", "8", "--rollout.n", "4", "--rollout.num-inference-steps", "4"),
        *(
            "--rollout.eval-n",
            "2",
            "--actor.loss.kl-loss-coef",
            "0.1",
            "--trainer.tensorboard",
            "False",
        ),
        *(
            "--trainer.total-training-steps",
            str(NUM_STEPS),
            "--trainer.save-freq",
            "1",
            "--trainer.test-freq",
            "2",
        ),
    ]


@pytest.fixture(scope="module")
def undisturbed(cli: Cli, args: list[str]) -> Path:
    cli.ok(*args, "--name", "undisturbed")
    return cli.cwd / "runs/undisturbed"


def metrics(run: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in row.items() if not k.startswith(CLOCKS)}
        for row in read_rows(run / "metrics.jsonl")
    ]


def assert_alike(run: Path, expected: Path, tolerance: float = 0.0) -> None:
    rows, others = metrics(run), metrics(expected)
    assert [row["step"] for row in rows] == [row["step"] for row in others]
    for row, other in zip(rows, others, strict=True):
        assert row == pytest.approx(other, rel=tolerance, abs=tolerance)


def num_steps(run: Path) -> int:
    return len(step_rows(run)) if (run / "metrics.jsonl").exists() else 0


def signalled_after_a_step(
    command: Command, run: Path, number: signal.Signals, delay_s: float
) -> Finished:
    """Send a signal this long after the command's next step, unless it ends before."""
    before = num_steps(run)
    while not command.has_ended() and num_steps(run) <= before:
        time.sleep(0.005)
    time.sleep(delay_s)
    if not command.has_ended():
        command.send(number)
    return command.wait()


@pytest.mark.parametrize(
    ("numbers", "code"),
    [((signal.SIGINT, signal.SIGTERM), 130), ((signal.SIGKILL, signal.SIGKILL), -9)],
)
def test_signals_at_any_stage(
    cli: Cli, args: list[str], undisturbed: Path, numbers: tuple[signal.Signals, ...], code: int
) -> None:
    """In turn soon after a step, in its evaluation or checkpoint, and ever later in the one that follows."""
    name = numbers[0].name.lower()
    run = cli.cwd / "runs" / name
    codes: list[int] = []
    for number, delay_s in zip(2 * numbers, (0.0, 0.03, 0.08, 0.15), strict=True):
        finished = signalled_after_a_step(cli.start(*args, "--name", name), run, number, delay_s)
        codes.append(finished.code)
        assert "Traceback" not in finished.err, finished.err
        if number != signal.SIGKILL and finished.code == code:
            assert Checkpointer(run / "checkpoints").steps()[-1] == num_steps(run)
    assert codes[0] == code
    assert set(codes) <= {code, 0}
    cli.ok(*args, "--name", name)
    assert_alike(run, undisturbed)
    weights = "export/transformer/diffusion_pytorch_model.safetensors"
    assert (run / weights).read_bytes() == (undisturbed / weights).read_bytes()


def test_an_engine_that_is_killed_is_replaced(cli: Cli, args: list[str], undisturbed: Path) -> None:
    command = cli.start(*args, "--rollout.num-processes", "2", "--name", "engine")
    run = cli.cwd / "runs/engine"
    command.wait_for_steps(run, 2)
    os.kill(grandchildren(command.pid)[0], signal.SIGKILL)
    finished = command.wait()
    assert finished.code == 0, finished
    assert_alike(run, undisturbed, 2e-3)


def test_a_training_rank_that_is_killed(cli: Cli, args: list[str], undisturbed: Path) -> None:
    """The command names it, and continues when it is called again."""
    ranks = [*args, "--trainer.num-processes", "2", "--name", "rank"]
    kill_a_rank(cli.start(*ranks), cli.cwd / "runs/rank")
    assert "resuming after step" in cli.ok(*ranks)
    assert_alike(cli.cwd / "runs/rank", undisturbed, 2e-3)


def test_a_cluster_ends_early(cli: Cli, args: list[str]) -> None:
    """Controllers and engines that sample the next step already are no hindrance, and the best policy is exported."""
    options = [
        "--runtime",
        "ray",
        "--controllers",
        "2",
        "--trainer.test-freq",
        "1",
        "--actor.optim.lr",
        "1e-2",
    ]
    options += [
        "--trainer.export",
        "best",
        "--trainer.early-stopping-patience",
        "2",
        "--reward.kind",
        "rewards.py:dark",
    ]
    out = cli.ok(*args, *options, "--reward.held-out", "rewards.py:red", "--name", "early")
    run = cli.cwd / "runs/early"
    last = metrics(run)[-1]
    assert last["val/evaluations_since_best"] == 2
    assert f"step {last['step']}: no improvement in 2 evaluations: the run ends early" in out
    assert f"exporting the policy of step {last['step'] - 2}, the best on held-out prompts" in out
    assert Checkpointer(run / "checkpoints").steps()[-1] == last["step"] < NUM_STEPS
