"""A run that dies at any moment, or is interrupted, ends as if nothing had happened."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, Command, metrics_of, read_rows, reproducible, step_rows

from gcore_ckpt import Checkpointer

KILLS = int(os.environ.get("GCORE_LLM_KILLS", "3"))
SEED = int(os.environ.get("GCORE_LLM_KILLS_SEED", "0"))

JOB = [
    *("train", "--threads", "1", "--device", "cpu"),
    *("--warmup.max-steps", "8", "--warmup.batch-size", "64", "--warmup.test-freq", "4"),
    *("--task.num-train", "500", "--task.num-val", "16", "--task.params.max-terms", "2"),
    *("--data.train-batch-size", "8", "--rollout.n", "4", "--data.max-response-length", "8"),
    *(
        "--actor.ppo-mini-batch-size",
        "4",
        "--actor.ppo-epochs",
        "2",
        "--actor.loss.kl-loss-coef",
        "0.01",
    ),
    *(
        "--trainer.total-training-steps",
        "6",
        "--trainer.save-freq",
        "2",
        "--trainer.test-freq",
        "3",
    ),
]
# Scores that differ within most groups, not all: surplus groups and several waves are part of what must come back.
REWARD = """
def reward(prompt, completion, row):
    return float(sum(map(ord, completion)) % 3 == 0)
"""


def steps_done(run: Path) -> int:
    return (
        max((int(row["step"]) for row in step_rows(run)), default=0)
        if (run / "metrics.jsonl").exists()
        else 0
    )


def outcome(run: Path) -> dict[str, Any]:
    """All that a run gives, apart from what a clock gave."""
    files = ("warmup.jsonl", "samples.jsonl", "samples/before.jsonl", "samples/after.jsonl")
    weights = ("model/model.safetensors", "export/model.safetensors", "export/tokenizer.json")
    return {
        "metrics": metrics_of(run),
        **{name: read_rows(run / name) for name in files},
        **{name: (run / name).read_bytes() for name in weights},
    }


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A run that nothing disturbed."""

    args: Sequence[object]
    outcome: dict[str, Any]
    seconds: float


@pytest.fixture(scope="module")
def whole(shared_cli: Cli) -> Callable[[int], Whole]:
    reward = shared_cli.cwd / "thirds.py"
    reward.write_text(REWARD)
    made: dict[int, Whole] = {}
    shared_cli.ok("--help")  # the server has started, its time is not the run's

    def run(controllers: int) -> Whole:
        if controllers not in made:
            args = [*JOB, "--reward", f"{reward}:reward", "--controllers", controllers]
            start_s = time.monotonic()
            shared_cli.ok(*args, "--name", f"whole-{controllers}")
            seconds = time.monotonic() - start_s
            expected = outcome(shared_cli.cwd / f"runs/whole-{controllers}")
            assert any(row.get("sampling/waves", 0) > 1 for row in expected["metrics"])
            made[controllers] = Whole(args=args, outcome=expected, seconds=seconds)
        return made[controllers]

    return run


def phase(run: Path) -> str:
    """How far a killed run had come."""
    if not (run / "config.toml").exists():
        return "before there was a run"
    if not (run / "model").is_dir():
        return "in the warm-up"
    if (run / "report.html").exists():
        return "after the report"
    exported = ", export written" if (run / "export").is_dir() else ""
    return f"after step {steps_done(run)}, checkpoints of {Checkpointer(run / 'checkpoints').steps()}{exported}"


@pytest.mark.slow
def test_kill_at_any_moment(cli: Cli, whole: Callable[[int], Whole]) -> None:
    """One kill in each equal part of the run's time, from its warm-up to its report."""
    rng = random.Random(SEED)
    for kill in range(KILLS):
        expected = whole(2 if kill == 1 else 1)
        name = f"killed-{kill}"
        run = cli.cwd / "runs" / name
        args = [*expected.args, "--name", name]
        delay_s = (kill + rng.random()) / KILLS * expected.seconds
        while not is_killed(cli.start(*args), delay_s):
            shutil.rmtree(run)
            delay_s *= 0.9  # it was faster than the one that was timed
        print(f"kill {kill} after {delay_s:.2f} s of {expected.seconds:.2f} s: {phase(run)}")
        cli.ok(*args)
        assert outcome(run) == expected.outcome
    # The samples shown of a step do not depend on how many controllers made it.
    alone, together = (whole(controllers).outcome["samples.jsonl"][:4] for controllers in (1, 2))
    assert alone == together


def is_killed(command: Command, delay_s: float) -> bool:
    """Kill a command after ``delay_s``; whether it had not come to its end by then."""
    command.has_ended(delay_s)
    command.send(signal.SIGKILL)
    return command.wait().code == -signal.SIGKILL


@pytest.mark.slow
def test_kill_again_and_again(cli: Cli, whole: Callable[[int], Whole]) -> None:
    """Kills on the way to a checkpoint, just behind it, and between the last one and the export do not add up."""
    expected = whole(1)
    run = cli.cwd / "runs" / "again"
    args = [*expected.args, "--name", "again"]
    for step in (1, 2, 3, 6):
        command = cli.start(*args)
        while steps_done(run) < step and not command.has_ended(0.01):
            pass
        command.send(signal.SIGKILL)
        command.wait()
    command = cli.start(*args)
    while 6 not in Checkpointer(run / "checkpoints").steps() and not command.has_ended(0.002):
        pass
    command.send(signal.SIGKILL)
    command.wait()
    assert not (run / "export").exists()
    cli.ok(*args)
    assert outcome(run) == expected.outcome


@pytest.mark.parametrize("controllers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_interrupt_saves_the_last_finished_step(
    cli: Cli, whole: Callable[[int], Whole], controllers: int
) -> None:
    """Wherever in a step a scheduler's SIGTERM or SIGUSR1 hits, no finished step is made twice."""
    expected = whole(controllers)
    run = cli.cwd / "runs" / "interrupted"
    args = [*expected.args, "--name", "interrupted", "--trainer.save-freq", "100"]
    rng = random.Random(SEED + controllers)
    reached = 0
    for number in (signal.SIGTERM, signal.SIGUSR1):
        command = cli.start(*args)
        while steps_done(run) <= reached and not command.has_ended(0.01):
            pass
        command.has_ended(rng.uniform(0, 0.1))
        command.send(number)
        finished = command.wait()
        assert (finished.code, finished.err) == (
            130,
            "gcore-llm: interrupted; the same command continues from the last finished step\n",
        )
        if reached:
            assert f"resuming after step {reached} of 6" in finished.out
        reached = steps_done(run)
        assert Checkpointer(run / "checkpoints").steps()[-1] == reached
    cli.ok(*args)
    assert outcome(run) == expected.outcome


def test_interrupt_before_the_first_step(cli: Cli, whole: Callable[[int], Whole]) -> None:
    """In the warm-up there is nothing to save: the next run starts again, and ends the same."""
    expected = whole(1)
    run = cli.cwd / "runs" / "early"
    args = [*expected.args, "--name", "early"]
    command = cli.start(*args)
    while not (run / "warmup.jsonl").exists() and not command.has_ended(0.005):
        pass
    command.send(signal.SIGINT)
    finished = command.wait()
    assert finished.code == 130
    assert finished.err.startswith("gcore-llm: interrupted")
    cli.ok(*args)
    assert outcome(run) == expected.outcome


def test_a_longer_run_continues_from_the_end(cli: Cli, own_args: list[str]) -> None:
    """Three steps and then five are five steps, and the export is of the fifth."""
    for name, totals in (("straight", (5,)), ("extended", (3, 5))):
        for total in totals:
            cli.ok(*own_args, "--trainer.total-training-steps", total, "--name", name)
    straight, extended = (cli.cwd / "runs" / name for name in ("straight", "extended"))
    assert [reproducible(r) for r in step_rows(straight)] == [
        reproducible(r) for r in step_rows(extended)
    ]
    first, second = (
        (run / "export/model.safetensors").read_bytes() for run in (straight, extended)
    )
    assert first == second
