"""The interface of objectives of language models, fields of their samples as tensors, and aggregation of token losses.

An objective turns a micro-batch's scores into its part of the batch's loss. Parts add up, over micro-batches and over
ranks, so a batch's gradient does not depend on how it is split. Shapes: N response tokens of any number of sequences,
laid end to end.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Generic, Literal, TypeVar, assert_never

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_trainer.advantages.estimator import check_finite_tokens
from gcore_trainer.config import LossAggMode
from gcore_trainer.errors import BatchError, ConfigError
from gcore_trainer.sample import MicroBatch, Sample


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """Scores of N response tokens in the samples' order. All shape [N], in float32 at least.

    Example:
        >>> scores = TokenScores(log_probs=torch.tensor([-0.1, -2.3]), entropies=torch.tensor([0.3, 1.9]))
        >>> scores.log_probs.sum()
        tensor(-2.4000)
    """

    log_probs: torch.Tensor
    entropies: torch.Tensor
    """Entropy of the distribution that each token was drawn from, in nats."""


ScoresT = TypeVar("ScoresT", TokenScores, torch.Tensor)
"""The scores that a model gives: those of a policy, or a critic's values [N]."""


PartialLoss = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""A micro-batch's part of the loss, and of the sums that `Objective.metrics` turns into metrics."""


@dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """The denominators of a batch's loss; those of its parts add up.

    Example:
        >>> BatchTotals.of([np.array([True, True, False]), np.array([True])])
        BatchTotals(num_sequences=2, num_tokens=3)
    """

    num_sequences: int
    num_tokens: int
    """Tokens that count."""

    @classmethod
    def of(cls, masks: Sequence[NDArray[np.bool_]]) -> "BatchTotals":
        """Count sequences and tokens from the masks [R_i] of each sequence, True where a token counts."""
        return cls(num_sequences=len(masks), num_tokens=int(sum(m.sum() for m in masks)))

    def __add__(self, other: "BatchTotals") -> "BatchTotals":
        num_sequences = self.num_sequences + other.num_sequences
        return BatchTotals(
            num_sequences=num_sequences, num_tokens=self.num_tokens + other.num_tokens
        )


def aggregation_weights(
    masks: Sequence[NDArray[np.bool_]],
    mode: LossAggMode,
    *,
    totals: BatchTotals,
    max_response_length: int | None = None,
) -> list[NDArray[np.float32]]:
    """Return the weight of every token, such that the batch's loss is the plain sum of weight times token loss.

    Because the weights are fixed before the batch is split, the sum does not depend on how it is split into
    micro-batches, nor on samples left out because their gradient is known to be zero.

    - ``token-mean``: 1 / (tokens in the batch), DAPO (arXiv 2503.14476, eq. 8)
    - ``seq-mean-token-sum``: 1 / (sequences)
    - ``seq-mean-token-mean``: 1 / (sequences x tokens of the sequence), GRPO (arXiv 2402.03300, eq. 3)
    - ``seq-mean-token-sum-norm``: 1 / (sequences x max_response_length), Dr. GRPO (arXiv 2503.20783)

    Args:
        masks: [R_i] of each sequence of a part of the batch, True where a token counts.
        max_response_length: the divisor of ``seq-mean-token-sum-norm``; unused in other modes.

    Raises:
        ConfigError: the mode needs ``max_response_length``, and there is none.
    """
    match mode:
        case "token-mean":
            divisors = [max(totals.num_tokens, 1)] * len(masks)
        case "seq-mean-token-sum":
            divisors = [totals.num_sequences] * len(masks)
        case "seq-mean-token-mean":
            divisors = [totals.num_sequences * max(int(m.sum()), 1) for m in masks]
        case "seq-mean-token-sum-norm":
            if max_response_length is None:
                raise ConfigError(
                    "max_response_length is None; expected 1 or more for loss_agg_mode 'seq-mean-token-sum-norm'"
                )
            divisors = [totals.num_sequences * max_response_length] * len(masks)
        case _:
            assert_never(mode)
    return [(m * (1.0 / d)).astype(np.float32) for m, d in zip(masks, divisors, strict=True)]


class Objective(ABC, Generic[ScoresT]):
    """A loss over samples, which reads ``ScoresT`` of the model.

    Example:
        >>> class UniformSFT(SFTObjective):
        ...     def totals(self, samples):
        ...         return BatchTotals(num_sequences=len(samples), num_tokens=len(samples))
        >>> sample = Sample(prompt_ids=np.array([1, 5]), response_ids=np.array([8, 9, 2]))
        >>> UniformSFT().totals([sample, sample])
        BatchTotals(num_sequences=2, num_tokens=2)
    """

    scores: ClassVar[Literal["tokens", "values"]]
    loss_name: ClassVar[str]
    """Metric of the loss; 0 for a batch in which no sample has a gradient."""
    entropy_grad: bool = False
    """The entropies need a gradient."""

    @abstractmethod
    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Raise `BatchError` for a field that is missing, or an entry that counts and is not finite."""

    def totals(self, samples: Sequence[Sample]) -> BatchTotals:
        """Return what these samples add to the batch's denominators."""
        return BatchTotals.of([s.mask for s in samples])

    def has_no_gradient(self, sample: Sample) -> bool:
        """Return whether the sample's gradient is known to be zero, so that it need not be computed."""
        return not sample.mask.any()

    @abstractmethod
    def partial_loss(
        self, scores: ScoresT, samples: MicroBatch, totals: BatchTotals
    ) -> PartialLoss:
        """Compute the part of the batch's loss that these samples make up.

        Args:
            scores: of the samples' response tokens, in their order.
        """

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Make metrics of the batch's sums: those named ``mean:...`` are divided by ``count``, the others stay."""
        count = max(sums.get("count", 1.0), 1.0)
        metrics = {self.loss_name: 0.0}
        for name, value in sums.items():
            if name.startswith("mean:"):
                metrics[name.removeprefix("mean:")] = value / count
            elif name != "count":
                metrics[name] = value
        return metrics


def named_scores(scores: TokenScores | torch.Tensor) -> torch.Tensor:
    """Return the main scores [N] of a model: a policy's log-probabilities, or a critic's values."""
    if isinstance(scores, TokenScores):
        return scores.log_probs
    return scores


def add_sums(sums: dict[str, Any], parts: Mapping[str, Any]) -> None:
    """Add a micro-batch's sums to those of the ones before it, by name and in float64."""
    for name, value in parts.items():
        if isinstance(value, torch.Tensor):
            value = value.double()
        sums[name] = sums.get(name, 0.0) + value


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
    values = np.concatenate([getattr(s, field) for s in samples])
    mask = np.concatenate([s.mask for s in samples])
    return on_device(np.where(mask, values, 0.0), like.device).to(like.dtype)


def token_weights(
    samples: MicroBatch,
    mode: LossAggMode,
    longest: int | None,
    *,
    totals: BatchTotals,
    like: torch.Tensor,
    mask: str = "mask",
) -> torch.Tensor:
    """Lay the samples' `aggregation_weights` end to end: [N], on the device of ``like``; ``mask``: of these tokens."""
    masks = [getattr(sample, mask) for sample in samples]
    weights = aggregation_weights(masks, mode, totals=totals, max_response_length=longest)
    return on_device(np.concatenate(weights), like.device)


def check_fields(micro_batches: Sequence[MicroBatch], loss: str, *fields: str) -> None:
    """Raise `BatchError` for a sample without a field that ``loss`` reads, or one that fails `check_finite_tokens`."""
    for field in fields:
        for sample in chain.from_iterable(micro_batches):
            if getattr(sample, field) is None:
                raise BatchError(
                    f"{field} is None; expected an array for every sample, which {loss} needs"
                )
    check_finite_tokens(micro_batches, *fields)
