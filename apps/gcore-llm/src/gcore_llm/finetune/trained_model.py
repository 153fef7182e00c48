"""The model that a fine-tuning command trains, with its objective, its evaluation, and DPO's reference log-probs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_llm.finetune.config import DPORunConfig, FineTuneConfig, RewardModelRunConfig
from gcore_llm.finetune.data import Example
from gcore_runs.errors import UserError
from gcore_runs.run_folder import write_atomically
from gcore_trainer import (
    BatchTotals,
    DPOObjective,
    MicroBatch,
    Objective,
    PackedModel,
    PackedValueModel,
    RewardModelObjective,
    SFTObjective,
    TokenScores,
    TorchTrainer,
)


class TrainedModel:
    """A model in training, with its tokenizer.

    Args:
        config: of the command.
        model: folder to start from.
        tokenizer: exported with the model.
        total_training_steps: where the learning rate's decay ends.
    """

    def __init__(self, config: FineTuneConfig, model: Path, tokenizer: Any, *, total_training_steps: int) -> None:
        self._tokenizer = tokenizer
        self._objective = _objective(config)
        self._packed = (PackedValueModel if self._objective.scores == "values" else PackedModel).from_pretrained(
            model,
            device=config.device,
            compute_dtype=getattr(torch, config.dtype),
            gradient_checkpointing=config.enable_gradient_checkpointing,
            max_length=config.data.max_length,
        )
        optimizer = config.optim.build(total_training_steps=total_training_steps)
        self.trainer = TorchTrainer(self._packed, optimizer=optimizer, objective=self._objective)

    def evaluate(self, micro_batches: Sequence[MicroBatch], after_each: Callable[[], None]) -> dict[str, float]:
        """Return the objective's metrics of held-out samples, under ``val/``, without an update.

        Args:
            micro_batches: held-out samples.
            after_each: called after every micro-batch.
        """
        samples = [s for batch in micro_batches for s in batch]
        totals: BatchTotals = self._objective.totals(samples)
        sums: dict[str, float] = {}
        for batch in micro_batches:
            _, parts = self._objective.partial_loss(self._scores(batch), batch, totals)
            for name, value in parts.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            after_each()
        metrics = self._objective.metrics(sums)
        # Predictions come without entropies.
        return {f"val/{name}": value for name, value in metrics.items() if name != "sft/entropy"}

    def log_probs(
        self, micro_batches: Sequence[MicroBatch], progressed: Callable[[int], None]
    ) -> dict[int, NDArray[np.float32]]:
        """Return the log-probs [R] of each sample by its ``id``; ``progressed`` is called with the number of pairs."""
        found: dict[int, NDArray[np.float32]] = {}
        for batch in micro_batches:
            found |= {id(s): own for s, own in zip(batch, self.trainer.log_probs([batch])[0], strict=True)}
            progressed(len(found) // 2)
        return found

    def _scores(self, batch: MicroBatch) -> Any:
        if self._objective.scores == "values":
            return torch.cat([torch.from_numpy(v) for v in self.trainer.values([batch])[0]])
        log_probs = torch.cat([torch.from_numpy(v) for v in self.trainer.log_probs([batch])[0]])
        return TokenScores(log_probs=log_probs, entropies=torch.zeros_like(log_probs))

    def export(self, path: Path) -> None:
        """Write a Hugging Face folder.

        transformers scores a classifier's last token that is no padding. So the tokenizer's padding token is set only
        where it does not end responses; otherwise a padded batch would be scored before its end, and is refused
        instead.
        """
        if self._objective.scores == "values":
            pad = self._tokenizer.pad_token_id
            self._packed.model.config.pad_token_id = None if pad == self._tokenizer.eos_token_id else pad
        self.trainer.save_pretrained(path)
        self._tokenizer.save_pretrained(path)


def _objective(config: FineTuneConfig) -> Objective[Any]:
    if isinstance(config, DPORunConfig):
        return DPOObjective(config.loss)
    if isinstance(config, RewardModelRunConfig):
        return RewardModelObjective(config.loss)
    return SFTObjective()


def with_reference_log_probs(
    examples: list[Example], path: Path, compute: Callable[[], dict[int, NDArray[np.float32]]], *, reuse: bool
) -> list[Example]:
    """Return the examples with their log-probs under the initial model.

    They are computed once for the whole data set, and kept in the run's folder: a frozen copy of the model would take
    memory during the whole run and a forward pass whenever a pair is used again.

    Args:
        examples: of the run.
        path: the ``.npz`` file.
        compute: returns the log-probs of each sample by its ``id``.
        reuse: read the file, because the model is no longer the initial one.

    Raises:
        UserError: the file is missing, or has other examples.
    """
    sizes = [s.response_ids.size for e in examples for s in e]
    if not reuse:
        found = compute()
        log_probs = np.concatenate([found[id(s)] for e in examples for s in e])

        def write(partial: Path) -> None:
            with partial.open("wb") as file:
                np.savez(file, log_probs=log_probs)

        write_atomically(path, write)
    elif not path.is_file():
        raise UserError(f"{path} is missing; expected the initial model's log-probs; --resume never starts a new run")
    else:
        with np.load(path) as file:
            log_probs = file["log_probs"]
        if log_probs.size != sum(sizes):
            raise UserError(
                f"{path} holds log-probs of {log_probs.size} tokens; expected {sum(sizes)}, as the data has: the data "
                "of a run cannot change; --resume never starts a new run"
            )
    parts = iter(np.split(log_probs, np.cumsum(sizes)[:-1]))
    return [[replace(s, ref_log_probs=next(parts)) for s in example] for example in examples]
