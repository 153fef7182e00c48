"""gcore: `TorchTrainer` on padded rows, on packed rows, and on packed rows that share the prompts of a group."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_bench.harness.processes import Spec
from gcore_bench.harness.report import Figures
from gcore_bench.trainer.updates import LOSS, OPTIMIZER, padded
from gcore_trainer import (
    MicroBatch,
    PackedModel,
    PolicyObjective,
    Sample,
    TokenScores,
    TorchParallel,
    TorchTrainer,
    token_scores,
)


class Stepper:
    """Steps of one trainer; ``parallel`` are its FSDP ranks, which share the prompts of a group."""

    def __init__(self, spec: Spec, parallel: TorchParallel | None = None) -> None:
        family = _PaddedModel if spec.contender == "gcore-padded" else PackedModel
        is_shared = spec.contender == "gcore-shared" or parallel is not None
        self._trainer = TorchTrainer(
            family.from_pretrained(Path(spec.folder) / "model", share_prefix=is_shared),
            optimizer=OPTIMIZER,
            objective=PolicyObjective(LOSS),
            parallel=parallel,
        )

    def step(self, samples: Sequence[Sample], batches: Sequence[Sequence[int]]) -> Figures:
        metrics = self._trainer.train_step([[samples[i] for i in batch] for batch in batches])
        return {
            "loss": metrics["actor/pg_loss"],
            "grad_norm": metrics["actor/grad_norm"],
            "computed_tokens": metrics["perf/computed_tokens"],
        }


class _PaddedModel(PackedModel):
    """transformers' own forward pass over one sample a row, padded to the longest; head and loss are gcore's."""

    _is_padded = False

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        # Only now: the load-time comparison with transformers needs the packed attention, and restores it.
        model.set_attn_implementation("sdpa")
        self._is_padded = True

    def score(
        self, samples: MicroBatch, *, entropy_grad: bool = False, routing: list[list[NDArray[np.int16]]] | None = None
    ) -> TokenScores:
        if not self._is_padded:
            return super().score(samples, entropy_grad=entropy_grad, routing=routing)
        rows = [np.concatenate([s.prompt_ids, s.response_ids[:-1]]) for s in samples]
        input_ids_BT, mask_BT = padded(rows), padded([np.ones_like(row) for row in rows])
        self.num_computed_tokens += input_ids_BT.numel()
        output = self.model.base_model(input_ids=input_ids_BT, attention_mask=mask_BT, use_cache=False)
        ends = ((s, s.num_inputs) for s in samples)
        parts = [row[n - s.response_ids.size : n] for row, (s, n) in zip(output[0], ends, strict=True)]
        target_ids = torch.cat([torch.from_numpy(s.response_ids) for s in samples])
        head: Any = self.model.get_output_embeddings()
        return token_scores(torch.cat(parts), head.weight, target_ids, entropy_grad=entropy_grad)
