"""The Trainer of transformers saves through a Checkpointer, and continues as if it had not stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments

from gcore_ckpt import Checkpointer, verify
from gcore_ckpt.integrations.transformers import CheckpointCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
]


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 32, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def make_trainer(folder: Path, callbacks: list[TrainerCallback], **options: Any) -> Trainer:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
        attention_dropout=0.5,  # draws from the generators, in every step
    )
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,  # of 10 steps
        "learning_rate": 1e-2,
        "warmup_steps": 3,
        "logging_steps": 1,
        "save_steps": 4,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    args = TrainingArguments(output_dir=str(folder / "trainer"), **arguments | options)
    return Trainer(model=Qwen3ForCausalLM(config), args=args, train_dataset=Rows(), callbacks=callbacks)


def losses(trainer: Trainer) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


class StopAfter(TrainerCallback):
    """As if the process were killed: what is saved at the end is not there."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if state.global_step == self.step:
            raise InterruptedError


def test_resumed_losses_are_those_of_one_run(tmp_path: Path) -> None:
    """Resume in the middle of an epoch, at its end, and after accumulated steps."""
    whole = make_trainer(tmp_path, [], save_strategy="no")
    whole.train()
    assert list(losses(whole)) == list(range(1, 21))
    for stop, resumed_at, strategy in ((10, 8, "steps"), (15, 10, "epoch")):
        path = tmp_path / f"checkpoints-{stop}"
        with Checkpointer(path) as checkpointer:
            callbacks = [CheckpointCallback(checkpointer), StopAfter(stop)]
            trainer = make_trainer(tmp_path, callbacks, save_strategy=strategy)
            with pytest.raises(InterruptedError):
                trainer.train()
        with Checkpointer(path) as checkpointer:
            assert checkpointer.steps()[-1] == resumed_at
            callback = CheckpointCallback(checkpointer)
            trainer = make_trainer(tmp_path, [callback], save_strategy=strategy)
            torch.rand(3)  # what the process does before it resumes
            trainer.train(resume_from_checkpoint=callback.resume(trainer))
            assert checkpointer.steps()[-1] == 20, "all is committed when train returns"
        assert losses(trainer) == losses(whole), "with the logs before the stop"
        for a, b in zip(trainer.model.parameters(), whole.model.parameters(), strict=True):
            assert torch.equal(a, b)
        verify(path)
    assert not (tmp_path / "trainer").exists() or not list((tmp_path / "trainer").glob("checkpoint-*"))


def test_without_a_committed_step_training_starts(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "checkpoints", keep=2) as checkpointer:
        callback = CheckpointCallback(checkpointer)
        trainer = make_trainer(tmp_path, [callback], gradient_accumulation_steps=2, max_steps=9)
        assert callback.resume(trainer) is None
        trainer.train(resume_from_checkpoint=callback.resume(trainer))
        assert checkpointer.steps() == [8, 9]
        saved = checkpointer.load(step=8)
    assert saved["trainer"]["global_step"] == 8
    assert [entry["step"] for entry in saved["trainer"]["log_history"]] == list(range(1, 9)), "its own log is there"
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
            make_trainer(tmp_path, [callback], save_strategy="best", metric_for_best_model="loss").train()
