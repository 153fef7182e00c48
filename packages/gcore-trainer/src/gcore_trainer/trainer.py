"""The interface of every training backend of language models, and what their steps have in common."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_trainer.base_trainer import BaseTrainer
from gcore_trainer.config import OptimizerConfig
from gcore_trainer.errors import BatchError, TrainerError
from gcore_trainer.losses import BatchTotals
from gcore_trainer.objectives import Objective, Share
from gcore_trainer.replicas import Replicas
from gcore_trainer.types import MicroBatch, by_sample

ShareOf = Callable[[Any, MicroBatch], Share]
"""(scores, samples) to this micro-batch's part of the loss and of the sums."""


class Trainer(BaseTrainer):
    """One rank's part of a language model in training.

    Args:
        optimizer: see `OptimizerConfig`.
        objective: what is minimised.
        replicas: one rank of each data-parallel replica.

    Raises:
        ConfigError: the rate is to decay, and over how many steps is not said.
    """

    def __init__(self, *, optimizer: OptimizerConfig, objective: Objective[Any], replicas: Replicas) -> None:
        super().__init__(optimizer=optimizer, replicas=replicas)
        self._objective = objective

    def train_step(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """One update on all samples of all replicas; the result does not depend on how they are split.

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
        kept = [[s for s in batch if not self._objective.is_idle(s)] for batch in micro_batches]
        kept = [batch for batch in kept if batch]
        everyones = self._replicas.gather_or_raise((self._objective.totals(samples), len(kept)), error)
        totals = sum((t for t, _ in everyones), BatchTotals(num_sequences=0, num_tokens=0))
        if not totals.num_sequences:
            raise BatchError("micro_batches holds no sample: at least one is needed")
        num_passes = max(n for _, n in everyones)

        def share(scores: Any, samples: MicroBatch) -> Share:
            return self._objective.share(scores, samples, totals)

        sums = self._backward(kept, num_passes, share)
        return {
            **self._objective.metrics(added(self._replicas.gather(sums))),
            **self._apply_gradient(),
        }

    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """Log-probabilities [R] of each sample's response under the present policy.

        Args:
            micro_batches: this replica's; another may have more of them, or none.
        """
        return self._predicted(micro_batches, "tokens")

    def log_probs_and_routing(
        self, micro_batches: Sequence[MicroBatch]
    ) -> list[list[tuple[NDArray[np.float32], NDArray[np.int16]]]]:
        """`log_probs`, and the experts [P + R - 1, L, K] that every token passed through: see `router_replay`.

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
        """Values [R] of the states before each sample's response tokens, under the present critic.

        Args:
            micro_batches: this replica's; another may have more of them, or none.
        """
        return self._predicted(micro_batches, "values")

    def _predicted(self, micro_batches: Sequence[MicroBatch], scores: str) -> list[list[NDArray[np.float32]]]:
        if self._objective.scores != scores:
            raise TrainerError(f"this trainer's model gives {self._objective.scores}: {scores} were asked for")
        num_passes = max(self._replicas.gather(len(micro_batches)))
        return by_sample(self._predict(micro_batches, num_passes), micro_batches)

    @property
    @abstractmethod
    def num_routers(self) -> int:
        """Layers whose choice of experts can be recorded and imposed; 0 where there are no experts."""

    @abstractmethod
    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face names and whole tensors, one at a time, on every rank; a tied head is left out."""

    @abstractmethod
    def save_pretrained(self, path: str | Path) -> None:
        """Write a Hugging Face folder that ``from_pretrained`` loads; all ranks call it, one writes."""

    @abstractmethod
    def _backward(self, micro_batches: Sequence[MicroBatch], num_passes: int, share: ShareOf) -> dict[str, float]:
        """Put the gradient of all replicas' shares together, from ``num_passes`` passes, and give this one's sums."""

    @abstractmethod
    def _predict(self, micro_batches: Sequence[MicroBatch], num_passes: int) -> list[NDArray[np.float32]]:
        """Log-probs or values [N] of each micro-batch, in ``num_passes`` passes."""

    @abstractmethod
    def _recording_routing(self) -> AbstractContextManager[Sequence[list[NDArray[np.int16]]]]:
        """Inside, `_predict` appends what it records: [P + R - 1, L, K] of each sample, a list for each pass."""


def added(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Sums by name."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total
