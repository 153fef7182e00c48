"""A Trainer of transformers and a tiny model, for `test_integrations_transformers.py`; as a program, for its ranks."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments

from gcore_ckpt import Checkpointer
from gcore_ckpt.integrations.transformers import CheckpointCallback


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
    model = Qwen3ForCausalLM(config)
    return Trainer(model=model, args=args, train_dataset=Rows(), callbacks=callbacks)


def losses(trainer: Trainer) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


class StopAfter(TrainerCallback):
    """As if the process were killed: what is saved at the end is not there."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if state.global_step == self.step:
            raise InterruptedError


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("checkpoints")
    parser.add_argument("stop", type=int)
    parser.add_argument("--fsdp")
    asked = parser.parse_args()
    options: dict[str, Any] = {"per_device_train_batch_size": 2, "save_steps": 4, "ddp_backend": "gloo"}
    if asked.fsdp:
        options |= {
            "fsdp": asked.fsdp,
            "fsdp_config": {"version": 2, "fsdp_transformer_layer_cls_to_wrap": "Qwen3DecoderLayer"},
        }
    with Checkpointer(asked.folder / asked.checkpoints) as checkpointer:
        callback = CheckpointCallback(checkpointer)
        stops = [StopAfter(asked.stop)] if asked.stop else []
        trainer = make_trainer(asked.folder, [callback, *stops], **options)
        try:
            trainer.train(resume_from_checkpoint=callback.resume(trainer))
        except InterruptedError:
            return
    if trainer.is_world_process_zero():
        (asked.folder / "losses.json").write_text(json.dumps(losses(trainer)))


if __name__ == "__main__":
    main()
