"""The interface of an objective, which turns a micro-batch's scores into its part of the batch's loss.

Parts add up, over micro-batches and over ranks. So a batch's gradient does not depend on how it is split.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, Literal

import numpy as np
import torch

from gcore_trainer.errors import BatchError
from gcore_trainer.losses.aggregation import BatchTotals
from gcore_trainer.packing.token_scores import ScoresT
from gcore_trainer.sample import MicroBatch, Sample

PartialLoss = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""A micro-batch's part of the loss, and of the sums that `Objective.metrics` turns into metrics."""


class Objective(ABC, Generic[ScoresT]):
    """A loss over samples.

    ``ScoresT`` is what the loss reads of the model: `TokenScores` of a policy, or values [N] of a critic.
    """

    scores: ClassVar[Literal["tokens", "values"]]
    loss_name: ClassVar[str]
    """Metric of the loss; 0 for a batch in which no sample has a gradient."""
    entropy_grad: bool = False
    """The entropies need a gradient."""

    @abstractmethod
    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Check that the samples have all that the loss reads.

        Raises:
            BatchError: a field is missing, or an entry that counts is not finite.
        """

    def totals(self, samples: Sequence[Sample]) -> BatchTotals:
        """Return what these samples add to the batch's denominators."""
        return BatchTotals.of([s.mask for s in samples])

    def has_no_gradient(self, sample: Sample) -> bool:
        """Return whether the sample's gradient is known to be zero, so that it need not be computed."""
        return not sample.mask.any()

    @abstractmethod
    def partial_loss(self, scores: ScoresT, samples: MicroBatch, totals: BatchTotals) -> PartialLoss:
        """Compute the part of the batch's loss that these samples make up.

        Args:
            scores: of the samples' response tokens, in their order.
            samples: a micro-batch.
            totals: of the whole batch.
        """

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Make metrics of the batch's sums: those named ``mean:...`` are divided by ``count``, the others stay."""
        count = max(sums.get("count", 1.0), 1.0)
        return {self.loss_name: 0.0} | {
            name.removeprefix("mean:"): value / count if name.startswith("mean:") else value
            for name, value in sums.items()
            if name != "count"
        }


def mask_of(samples: MicroBatch, *, like: torch.Tensor) -> torch.Tensor:
    """Lay the samples' masks end to end: [N] bool, on the device of ``like``."""
    return torch.from_numpy(np.concatenate([s.mask for s in samples])).to(like.device)


def field_of(samples: MicroBatch, field: str, *, like: torch.Tensor) -> torch.Tensor:
    """Lay a per-token array of the samples end to end: [N], of the type and on the device of ``like``.

    Masked-out entries are 0 rather than multiplied by 0: NaN times 0 is NaN, in the gradient too.
    """
    arrays = [np.where(s.mask, getattr(s, field), 0.0) for s in samples]
    return torch.from_numpy(np.concatenate(arrays)).to(like)


def check_fields(micro_batches: Sequence[MicroBatch], loss: str, *fields: str) -> None:
    """Check per-token arrays of every sample.

    Args:
        micro_batches: of the samples; errors name a sample by its place in them.
        loss: that reads the arrays, for the error.
        fields: the arrays.

    Raises:
        BatchError: a sample lacks one, or an entry that counts is not finite.
    """
    for field in fields:
        if any(getattr(s, field) is None for batch in micro_batches for s in batch):
            raise BatchError(f"{field} is None; expected an array for every sample, which {loss} needs")
    check_finite(micro_batches, *fields)


def check_finite(micro_batches: Sequence[MicroBatch], *fields: str) -> None:
    """Check `Sample.check_finite` of every sample; an array that is None passes.

    Raises:
        BatchError: an entry that counts is not finite.
    """
    for i, batch in enumerate(micro_batches):
        for j, sample in enumerate(batch):
            sample.check_finite(f"micro_batches[{i}][{j}]", *fields)
