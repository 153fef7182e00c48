"""`gcore-llm sft`, `dpo` and `reward-model` on several ranks: one process's run, and what happens when one dies."""

from pathlib import Path

import pytest
import torch
from command_line import Cli, kill_a_rank, metrics_of, option_set, write_rows
from finetune_cases import pairs

from gcore_ckpt import load

pytestmark = pytest.mark.slow

FSDP = ("--trainer.num-processes", "2")
MEGATRON = (
    *FSDP,
    "--trainer.backend",
    "megatron",
    "--trainer.parallel.tensor-model-parallel-size",
    "2",
)


@pytest.fixture
def job(cli: Cli, tiny: Path) -> list[str]:
    """Four steps on eight rows each, an evaluation after each second one."""
    rows = pairs(80, seed=0)
    write_rows(cli.cwd / "pairs.jsonl", rows)
    write_rows(
        cli.cwd / "answers.jsonl",
        [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows],
    )
    return [
        *("--threads", "1", "--device", "cpu", "--model", str(tiny), "--data.val-size", "7"),
        *(
            "--data.train-batch-size",
            "8",
            "--data.max-length",
            "32",
            "--optim.lr",
            "5e-4",
            "--optim.grad-clip",
            "0.5",
        ),
        *(
            "--trainer.total-training-steps",
            "4",
            "--trainer.save-freq",
            "1",
            "--trainer.test-freq",
            "2",
        ),
    ]


@pytest.mark.parametrize(
    ("command", "file", "after"),
    [("sft", "answers", MEGATRON), ("dpo", "pairs", MEGATRON), ("reward-model", "pairs", ())],
    ids=["sft", "dpo", "reward-model"],
)
def test_ranks_train_as_one_process_and_others_continue(
    cli: Cli, job: list[str], command: str, file: str, after: tuple[str, ...]
) -> None:
    """Two steps on two ranks of FSDP2, and two on those of Megatron-Core or in one process."""
    args = [
        command,
        *job,
        "--data.train-files",
        f"{file}.jsonl",
        "--optim.lr-scheduler-type",
        "constant",
    ]
    cli.ok(*args, "--name", "alone")
    assert (
        cli(*option_set(args, "--trainer.total-training-steps", "2"), "--name", "ranks", *FSDP).code
        == 0
    )
    finished = cli(*args, "--name", "ranks", *after)
    assert finished.code == 0, finished
    assert "resuming after step 2 of 4" in finished.out
    rows, expected = metrics_of(cli.cwd / "runs/ranks"), metrics_of(cli.cwd / "runs/alone")
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-5, abs=1e-5)
    found, exported = (load(cli.cwd / f"runs/{name}/export") for name in ("ranks", "alone"))
    assert found.keys() == exported.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)


def test_a_killed_rank_is_named_and_the_same_command_continues(cli: Cli, job: list[str]) -> None:
    args = [
        "sft",
        *option_set(job, "--trainer.total-training-steps", "300"),
        "--data.train-files",
        "answers.jsonl",
    ]
    command = cli.start(*args, *FSDP)
    kill_a_rank(command, cli.cwd / "runs/sft")
    done = max(int(row["step"]) for row in metrics_of(cli.cwd / "runs/sft"))
    out = cli.ok(*option_set(args, "--trainer.total-training-steps", str(done + 1)), *FSDP)
    assert "resuming after step" in out
