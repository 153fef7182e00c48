"""Training on ranks of their own, over gloo: the same run as in one process, and what happens when a rank dies."""

import re
import shutil
import signal
import socket
from pathlib import Path

import pytest
from command_line import Cli, kill_a_rank, option_set, signal_a_rank, step_rows
from process_tree import is_running

pytestmark = pytest.mark.slow

RANKS = ["--trainer.num-processes", "2"]
SAME = {
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/entropy",
    "actor/kl_loss",
    "critic/score/mean",
    "critic/vf_loss",
}


def assert_same_training(run: Path, expected: Path) -> None:
    rows, others = step_rows(run), step_rows(expected)
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        for name in SAME & other.keys():
            assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-5), name


def test_fsdp_trains_as_one_process_and_each_resumes_the_other(
    cli: Cli, own_args: list[str]
) -> None:
    """With a critic and a reference; three ranks continue from one process's checkpoint, and one from theirs."""
    options = [
        "--algorithm.adv-estimator",
        "gae",
        "--actor.loss.kl-loss-coef",
        "0.1",
        "--trainer.save-freq",
        "1",
    ]
    four = option_set(own_args, "--trainer.total-training-steps", "4")
    cli.ok(*four, *options, "--name", "alone")
    cli.ok(*own_args, *options, "--name", "moved", *RANKS)
    three = option_set(own_args, "--trainer.total-training-steps", "3")
    cli.ok(*three, *options, "--name", "moved")
    cli.ok(*four, *options, "--name", "moved", "--trainer.num-processes", "3")
    assert_same_training(cli.cwd / "runs/moved", cli.cwd / "runs/alone")


def test_copies_of_shards_train_as_one_process_and_are_saved_once(
    cli: Cli, own_args: list[str]
) -> None:
    """Four ranks, of which two share parameters and two have copies (HSDP); then two ranks, and then one."""
    args = [*own_args, "--trainer.save-freq", "1", "--data.train-batch-size", "4"]
    three = option_set(args, "--trainer.total-training-steps", "3")
    cli.ok(*three, "--name", "alone", "--trainer.max-ckpt-to-keep", "3")
    one = option_set(args, "--trainer.total-training-steps", "1")
    cli.ok(
        *one, "--name", "moved", "--trainer.num-processes", "4", "--trainer.parallel.fsdp-size", "2"
    )
    [size, whole] = [
        sum(
            f.stat().st_size
            for f in (cli.cwd / f"runs/{name}/checkpoints").glob("*1/**/*.safetensors")
        )
        for name in ("moved", "alone")
    ]
    assert 0 < size < 1.05 * whole
    cli.ok(*option_set(args, "--trainer.total-training-steps", "2"), "--name", "moved", *RANKS)
    cli.ok(*three, "--name", "moved")
    assert_same_training(cli.cwd / "runs/moved", cli.cwd / "runs/alone")


MEGATRON = [
    *("--trainer.num-processes", "4", "--trainer.backend", "megatron"),
    *(
        "--trainer.parallel.tensor-model-parallel-size",
        "2",
        "--trainer.parallel.pipeline-model-parallel-size",
        "2",
    ),
]
FSDP = ["--trainer.num-processes", "3"]


@pytest.fixture(scope="module")
def four_steps(own_args: list[str]) -> list[str]:
    """With a reference, a warm-up of the rate and its decay, which continue across a change of the backend."""
    return [
        *option_set(own_args, "--trainer.total-training-steps", "4"),
        *("--actor.loss.kl-loss-coef", "0.1", "--actor.optim.lr-warmup-steps", "3"),
        *("--actor.optim.lr-scheduler-type", "cosine", "--trainer.save-freq", "2"),
    ]


@pytest.mark.parametrize(
    ("before", "after", "options"),
    [(MEGATRON, FSDP, ["--actor.lora-rank", "4"]), (FSDP, MEGATRON, [])],
    ids=["megatron first, adapters alone", "fsdp first"],
)
def test_what_one_backend_saved_the_other_resumes(
    cli: Cli, four_steps: list[str], before: list[str], after: list[str], options: list[str]
) -> None:
    """Two steps on TP2 x PP2 and two on FSDP2 over three ranks, or the other way round."""
    cli.ok(*four_steps, *options, "--name", "alone")
    assert cli(*four_steps, *options, *before).code == 0
    # A shorter run would have another schedule.
    _, last = sorted((cli.cwd / "runs/default/checkpoints").glob("step-*"))
    shutil.rmtree(last)
    finished = cli(*four_steps, *options, *after)
    assert finished.code == 0, finished
    assert "resuming after step 2 of 4" in finished.out
    assert_same_training(cli.cwd / "runs/default", cli.cwd / "runs/alone")


def test_a_killed_rank_is_named_and_the_run_continues(cli: Cli, own_args: list[str]) -> None:
    many = option_set(own_args, "--trainer.total-training-steps", "500")
    command = cli.start(*many, "--trainer.save-freq", "1", *RANKS)
    kill_a_rank(command, cli.cwd / "runs/default")
    done = max(row["step"] for row in step_rows(cli.cwd / "runs/default"))
    out = cli.ok(
        *option_set(many, "--trainer.total-training-steps", str(int(done) + 1)),
        "--trainer.save-freq",
        "1",
    )
    assert "resuming after step" in out


def test_a_stopped_rank_is_named_and_two_interrupts_end_the_run(
    cli: Cli, own_args: list[str]
) -> None:
    """The second one does not wait for the rank."""
    args = [
        *option_set(own_args, "--trainer.total-training-steps", "500"),
        "--trainer.save-freq",
        "1",
        *RANKS,
    ]
    command = cli.start(*args, "--trainer.heartbeat-timeout-s", "3")
    stopped = signal_a_rank(command, cli.cwd / "runs/default", signal.SIGSTOP)
    finished = command.wait()
    assert finished.code == 2, finished
    logs = cli.cwd / "runs/default/logs"
    message = (
        rf"gcore-llm: error: training rank 1 \(process {stopped[1]}\) gave no sign of life for 3 s in \w+: it is "
        rf"stopped on {socket.gethostname()}, by /proc/{stopped[1]}/stat; "
        rf"its log is {logs}/trainer-1.log\n"
    )
    assert re.fullmatch(message, finished.err)
    # The other one waits for it.
    assert "most recent call first" in (logs / "trainer-0.log").read_text()

    command = cli.start(*args)
    stopped += signal_a_rank(command, cli.cwd / "runs/default", signal.SIGSTOP)
    command.send(signal.SIGINT)
    assert not command.has_ended(1.0)
    command.send(signal.SIGINT)
    assert command.has_ended(60.0)
    assert command.wait().code == 130
    assert not any(is_running(pid) for pid in stopped)
