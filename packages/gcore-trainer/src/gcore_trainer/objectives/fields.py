"""Fields of a micro-batch's samples as tensors, laid end to end, and their checks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import check_finite_tokens
from gcore_trainer.config import LossAggMode
from gcore_trainer.errors import BatchError
from gcore_trainer.objectives.objective import BatchTotals, aggregation_weights
from gcore_trainer.sample import MicroBatch


def on_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor of a device, without waiting for it.

    From ordinary memory torch copies to a GPU only when it has finished all that it was given, and waits; from pinned
    memory the copy takes its turn.
    """
    tensor = torch.from_numpy(array)
    if device.type != "cuda" or not torch.cuda.is_available():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def mask_of(samples: MicroBatch, *, like: torch.Tensor) -> torch.Tensor:
    """Lay the samples' masks end to end: [N] bool, on the device of ``like``."""
    return on_device(np.concatenate([s.mask for s in samples]), like.device)


def field_of(samples: MicroBatch, field: str, *, like: torch.Tensor) -> torch.Tensor:
    """Lay a per-token array of the samples end to end: [N], like ``like``, and 0 where a token does not count."""
    # Not multiplied by 0: NaN times 0 is NaN, in the gradient too.
    values, mask = np.concatenate([getattr(s, field) for s in samples]), np.concatenate([s.mask for s in samples])
    return on_device(np.where(mask, values, 0.0), like.device).to(like.dtype)


def token_weights(
    samples: MicroBatch, mode: LossAggMode, longest: int | None, *, totals: BatchTotals, like: torch.Tensor
) -> torch.Tensor:
    """Lay the samples' `aggregation_weights` end to end: [N], on the device of ``like``."""
    weights = aggregation_weights([s.mask for s in samples], mode, totals=totals, max_response_length=longest)
    return on_device(np.concatenate(weights), like.device)


def check_fields(micro_batches: Sequence[MicroBatch], loss: str, *fields: str) -> None:
    """Raise `BatchError` for a sample that lacks a field, which ``loss`` reads, or that fails `check_finite` in it."""
    for field in fields:
        if any(getattr(s, field) is None for batch in micro_batches for s in batch):
            raise BatchError(f"{field} is None; expected an array for every sample, which {loss} needs")
    check_finite_tokens(micro_batches, *fields)


def check_finite(micro_batches: Sequence[Sequence[Any]], *fields: str) -> None:
    """Check `Sample.check_finite` of every sample; an array that is None passes."""
    for i, batch in enumerate(micro_batches):
        for j, sample in enumerate(batch):
            sample.check_finite(f"micro_batches[{i}][{j}]", *fields)
