"""TRL: the loss of a real `GRPOTrainer` on batches padded the way it pads them, its backward pass, and AdamW."""

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from gcore_bench.harness.processes import Spec
from gcore_bench.trainer.updates import LOSS, LossStep, padded
from gcore_runs import build_tokenizer
from gcore_trainer import Sample


class Stepper(LossStep):
    """Steps of a `GRPOTrainer` on given rollouts."""

    def __init__(self, spec: Spec) -> None:
        # Otherwise TRL imports vLLM, which takes ten seconds and is not used here.
        import_module("trl.import_utils").__dict__["is_vllm_available"] = lambda *_, **__: False
        from datasets import Dataset
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer

        folder = Path(spec.folder)
        policy: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        self._trainer: Any = GRPOTrainer(
            model=policy,
            reward_funcs=_no_reward,
            args=GRPOConfig(
                output_dir=str(folder / "trl"),
                per_device_train_batch_size=2,
                gradient_accumulation_steps=1,
                num_generations=2,
                loss_type="dapo",
                epsilon=LOSS.clip_ratio_low,
                epsilon_high=LOSS.clip_ratio_high,
                beta=0.0,
                temperature=1.0,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to="none",
            ),
            train_dataset=Dataset.from_dict({"prompt": ["1", "2"]}),
            # TRL requires one; this bench does not use it.
            processing_class=build_tokenizer(folder / "tokenizer"),
        )
        super().__init__(self._trainer.model)
        self.model.train()

    def partial_losses(
        self, samples: Sequence[Sample], batches: Sequence[Sequence[int]]
    ) -> Iterator[tuple[torch.Tensor, int]]:
        inputs = _inputs(samples)
        # The loss of a micro-batch is scaled by the number of them in a generation batch.
        self._trainer.args.steps_per_generation = len(batches)
        self._trainer.current_gradient_accumulation_steps = len(batches)
        for batch in batches:
            rows = torch.tensor(batch)
            part = {name: value[rows] if value.dim() else value for name, value in inputs.items()}
            num_tokens = part["prompt_ids"].numel() + part["completion_ids"].numel()
            yield self._trainer._compute_loss(self.model, part), num_tokens


def _inputs(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Pad prompts on the left and completions on the right, to the longest of the whole generation batch."""
    prompts, completions = [s.prompt_ids for s in samples], [s.response_ids for s in samples]
    completion_mask = padded([np.ones_like(c) for c in completions])
    return {
        "prompt_mask": padded([np.ones_like(p) for p in prompts], side="left"),
        "completion_mask": completion_mask,
        "prompt_ids": padded(prompts, side="left"),
        "completion_ids": padded(completions),
        "advantages": torch.tensor([float(s.advantages[0]) for s in samples if s.advantages is not None]),
        "old_per_token_logps": padded([s.old_log_probs for s in samples]),
        "num_items_in_batch": completion_mask.sum(),
    }


def _no_reward(completions: list[Any], **_: Any) -> list[float | None]:
    return [0.0] * len(completions)
