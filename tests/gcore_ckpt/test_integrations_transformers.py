"""The Trainer of transformers saves through a Checkpointer, and continues as if it had not stopped."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_trainer
import torch
from forks import FORK
from tiny_trainer import StopAfter, losses, make_trainer

from gcore_ckpt import Checkpointer, verify
from gcore_ckpt.integrations.transformers import CheckpointCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
]


@pytest.mark.parametrize(
    ("stop", "resumed_at", "options"),
    [
        (10, 8, {}),  # in the middle of an epoch
        (15, 10, {"save_strategy": "epoch"}),
        (12, 10, {"save_steps": 5}),  # at the end of an epoch
        (14, 12, {"gradient_accumulation_steps": 2, "num_train_epochs": 4}),
    ],
)
def test_resumed_losses_are_those_of_one_run(
    tmp_path: Path, stop: int, resumed_at: int, options: dict[str, Any]
) -> None:
    unsaved: dict[str, Any] = options | {"save_strategy": "no"}
    whole = make_trainer(tmp_path, [], **unsaved)
    whole.train()
    assert list(losses(whole)) == list(range(1, 21))
    path = tmp_path / "checkpoints"
    with Checkpointer(path) as checkpointer:
        trainer = make_trainer(
            tmp_path, [CheckpointCallback(checkpointer), StopAfter(stop)], **options
        )
        with pytest.raises(InterruptedError):
            trainer.train()
    with Checkpointer(path) as checkpointer:
        assert checkpointer.steps()[-1] == resumed_at
        callback = CheckpointCallback(checkpointer)
        trainer = make_trainer(tmp_path, [callback], **options)
        torch.rand(3)  # what the process does before it resumes
        trainer.train(resume_from_checkpoint=callback.resume(trainer))
        assert checkpointer.steps()[-1] == 20, "all is committed when train returns"
    assert losses(trainer) == losses(whole), "with the logs before the stop"
    assert trainer.model is not None
    assert whole.model is not None
    for a, b in zip(trainer.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)
    verify(path)
    assert not list((tmp_path / "trainer").glob("checkpoint-*")), "in place of its own"


@pytest.mark.slow
@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("is_sharded", [False, True])
def test_ranks_resume(tmp_path: Path, is_sharded: bool) -> None:
    def run(path: str, stop: int) -> None:
        command = [
            *(sys.executable, *FORK, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", "2"),
            *("--no-python", sys.executable, *FORK),
        ]
        arguments = [
            tiny_trainer.__file__,
            tmp_path,
            path,
            stop,
            *(["--is-sharded"] if is_sharded else []),
        ]
        environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
        done = subprocess.run(
            [*command, *map(str, arguments)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    run("whole", stop=0)
    expected = json.loads((tmp_path / "losses.json").read_text())
    assert len(expected) == 10
    (tmp_path / "losses.json").unlink()
    run("parts", stop=9)
    checkpointer = Checkpointer(tmp_path / "parts")
    assert checkpointer.steps() == [4, 8]
    moments = checkpointer.load(only=["optimizer.state"])["optimizer"]["state"]
    assert ("model.norm.weight" in moments) == is_sharded, "by names where they are sharded"
    run("parts", stop=0)
    assert json.loads((tmp_path / "losses.json").read_text()) == expected


def test_without_a_committed_step_training_starts(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "checkpoints", keep=2) as checkpointer:
        callback = CheckpointCallback(checkpointer)
        trainer = make_trainer(tmp_path, [callback], gradient_accumulation_steps=2, max_steps=9)
        assert callback.resume(trainer) is None
        trainer.train(resume_from_checkpoint=callback.resume(trainer))
        assert checkpointer.steps() == [8, 9]
        saved = checkpointer.load(step=8)
    assert saved["trainer"]["global_step"] == 8
    assert [entry["step"] for entry in saved["trainer"]["log_history"]] == list(range(1, 9)), (
        "its own log is there"
    )
    assert saved["model"]["lm_head.weight"] is saved["model"]["model.embed_tokens.weight"]


def test_an_earlier_step_is_resumed(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        first = make_trainer(tmp_path, [CheckpointCallback(checkpointer)])
        first.train()
        callback = CheckpointCallback(checkpointer)
        trainer = make_trainer(tmp_path, [callback])
        folder = callback.resume(trainer, step=12)
        checkpointer.rollback(12)
        trainer.train(resume_from_checkpoint=folder)
    assert losses(trainer) == losses(first)


def test_what_the_trainer_cannot_do_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        callback = CheckpointCallback(checkpointer)
        with pytest.raises(ValueError, match="save_strategy is 'best'"):
            make_trainer(
                tmp_path, [callback], save_strategy="best", metric_for_best_model="loss"
            ).train()


def test_a_trainer_that_does_not_start_where_it_was_prepared_to_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "checkpoints") as checkpointer:
        make_trainer(tmp_path, [CheckpointCallback(checkpointer)], max_steps=2).train()
        callback = CheckpointCallback(checkpointer)
        trainer = make_trainer(tmp_path, [callback])
        folder = callback.resume(trainer)
        with pytest.raises(
            ValueError, match="resume was called for step 2, and the Trainer starts at step 0"
        ):
            trainer.train()
        trainer.train(resume_from_checkpoint=folder)
        assert checkpointer.steps()[-1] == 20
