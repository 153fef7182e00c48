"""The interface of every training backend of language models, and the common part of their steps."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_trainer.config import OptimizerConfig
from gcore_trainer.errors import BatchError, TrainerError
from gcore_trainer.losses.aggregation import BatchTotals
from gcore_trainer.objectives.objective import Objective
from gcore_trainer.sample import MicroBatch, by_sample
from gcore_trainer.training.base_trainer import BaseTrainer, Optimizer, added
from gcore_trainer.training.replicas import Replicas


class Trainer(BaseTrainer, ABC):
    """One rank's part of a language model in training.

    Args:
        config: of the optimizer.
        optimizer: of this rank's parameters.
        objective: what is minimised.
        replicas: one rank of each data-parallel replica.

    Raises:
        ConfigError: the learning rate decays, and ``total_training_steps`` is not set.
    """

    def __init__(
        self, *, config: OptimizerConfig, optimizer: Optimizer, objective: Objective[Any], replicas: Replicas
    ) -> None:
        super().__init__(config=config, optimizer=optimizer, replicas=replicas)
        self._objective = objective

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Make one update on all samples of all replicas; the result does not depend on how they are split.

        Samples whose gradient is known to be zero are left out of the passes; they count in the loss's denominators.

        Args:
            micro_batches: this replica's; another may have more of them, or none.

        Returns:
            the objective's metrics, ``actor/grad_norm``, ``actor/lr``, ``actor/nonfinite_steps`` and
            ``perf/computed_tokens`` (those that passed through the model, in all replicas); the same on all ranks.

        Raises:
            BatchError: the samples lack what the objective needs, hold numbers that are not finite at tokens that
                count, or there are none at all.
            NonFiniteGradientError: too many skipped steps in a row.
        """
        error = None
        try:
            self._objective.check(micro_batches)
        except TrainerError as found:
            error = found
        samples = [s for batch in micro_batches for s in batch]
        kept = [[s for s in batch if not self._objective.has_no_gradient(s)] for batch in micro_batches]
        kept = [batch for batch in kept if batch]
        everyones = self._replicas.gather_or_raise((self._objective.totals(samples), len(kept)), error)
        totals = sum((t for t, _ in everyones), BatchTotals(num_sequences=0, num_tokens=0))
        if not totals.num_sequences:
            raise BatchError("micro_batches holds no sample; expected at least one in any replica")
        sums = self._backward(kept, max(n for _, n in everyones), totals)
        metrics = self._objective.metrics(added(self._replicas.gather(sums)))
        return metrics | self._apply_gradient()

    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """Return the log-probabilities [R] of each sample's response under the present policy.

        Args:
            micro_batches: this replica's; another may have more of them, or none.
        """
        return self._predicted(micro_batches, "tokens")

    def log_probs_and_routing(
        self, micro_batches: Sequence[MicroBatch]
    ) -> list[list[tuple[NDArray[np.float32], NDArray[np.int16]]]]:
        """Return `log_probs`, and the experts [P + R - 1, L, K] that every token passed through: see `router_replay`.

        Args:
            micro_batches: this replica's; another may have more of them, or none.

        Raises:
            TrainerError: the model has no routers.
        """
        if not self.num_routers:
            raise TrainerError("the model has no routers whose choice of experts could be recorded")
        with self._recording_routing() as routing:
            log_probs = self.log_probs(micro_batches)
        return [list(zip(*pair, strict=True)) for pair in zip(log_probs, routing, strict=False)]

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """Return the values [R] of the states before each sample's response tokens, under the present critic.

        Args:
            micro_batches: this replica's; another may have more of them, or none.
        """
        return self._predicted(micro_batches, "values")

    def _predicted(self, micro_batches: Sequence[MicroBatch], scores: str) -> list[list[NDArray[np.float32]]]:
        if self._objective.scores != scores:
            raise TrainerError(f"the trainer's model gives {self._objective.scores}; expected {scores}")
        num_passes = max(self._replicas.gather(len(micro_batches)))
        return by_sample(self._predict(micro_batches, num_passes), micro_batches)

    @property
    @abstractmethod
    def num_routers(self) -> int:
        """Layers whose choice of experts can be recorded and imposed; 0 for a model without experts."""

    @abstractmethod
    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield Hugging Face names and whole tensors, one at a time, on every rank; a tied head is left out."""

    @abstractmethod
    def save_pretrained(self, path: str | Path) -> None:
        """Write a Hugging Face folder that ``from_pretrained`` loads; all ranks call it, one writes."""

    @abstractmethod
    def _backward(self, micro_batches: Sequence[MicroBatch], num_passes: int, totals: BatchTotals) -> dict[str, float]:
        """Compute the gradient of all replicas' loss in ``num_passes`` passes; return the sums of this one."""

    @abstractmethod
    def _predict(self, micro_batches: Sequence[MicroBatch], num_passes: int) -> list[NDArray[np.float32]]:
        """Compute log-probs or values [N] of each micro-batch, in ``num_passes`` passes."""

    @abstractmethod
    def _recording_routing(self) -> AbstractContextManager[Sequence[list[NDArray[np.int16]]]]:
        """Make `_predict` append the experts that it records: [P + R - 1, L, K] of each sample, a list a pass."""
