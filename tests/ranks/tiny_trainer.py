"""A Trainer of transformers and a tiny model, for `test_integrations_transformers.py`; as a program, for its ranks."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed.configuration_utils import DistributedConfig

from gcore_ckpt import Checkpointer
from gcore_ckpt.integrations.transformers import CheckpointCallback


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 32, (6,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def make_model() -> Qwen3ForCausalLM:
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
    return Qwen3ForCausalLM(config)


def load_sharded(folder: Path) -> Qwen3ForCausalLM:
    """Return the model, sharded by FSDP2 over all ranks as it is loaded."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        make_model().save_pretrained(folder)
    dist.barrier()
    shards = DistributedConfig(fsdp_size=dist.get_world_size())
    return Qwen3ForCausalLM.from_pretrained(folder, distributed_config=shards)


def make_trainer(
    folder: Path,
    callbacks: list[TrainerCallback],
    model: Qwen3ForCausalLM | None = None,
    **options: Any,
) -> Trainer:
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
    return Trainer(
        model=model or make_model(), args=args, train_dataset=Rows(), callbacks=callbacks
    )


def losses(trainer: Trainer) -> dict[int, float]:
    return {
        int(entry["step"]): entry["loss"] for entry in trainer.state.log_history if "loss" in entry
    }


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
    parser.add_argument("--is-sharded", action="store_true")
    asked = parser.parse_args()
    options: dict[str, Any] = {"ddp_backend": "gloo", "save_only_model": asked.is_sharded}
    with Checkpointer(asked.folder / asked.checkpoints) as checkpointer:
        callback = CheckpointCallback(checkpointer)
        stops = [StopAfter(asked.stop)] if asked.stop else []
        model = load_sharded(asked.folder / "model") if asked.is_sharded else make_model()
        trainer = make_trainer(asked.folder, [callback, *stops], model, **options)
        try:
            trainer.train(resume_from_checkpoint=callback.resume(trainer))
        except InterruptedError:
            return
    if trainer.is_world_process_zero():
        (asked.folder / "losses.json").write_text(json.dumps(losses(trainer)))


if __name__ == "__main__":
    main()
