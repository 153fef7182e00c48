"""Loss and optimizer of a step: the same for every contender."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from gcore_bench.harness.report import Figures
from gcore_trainer import OptimizerConfig, PolicyLossConfig, Sample

OPTIMIZER = OptimizerConfig(lr=1e-9, grad_clip=1.0)
"""The rate is so low that the weights stay the same, and every step computes the same loss."""
LOSS = PolicyLossConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, loss_agg_mode="token-mean")


class LossStep(ABC):
    """Steps of a model under the loss of another library, with the optimizer that `TorchTrainer` would make."""

    def __init__(self, model: Any) -> None:
        self.model = model
        settings: dict[str, Any] = {name: getattr(OPTIMIZER, name) for name in ("lr", "betas", "eps", "weight_decay")}
        self._optimizer = torch.optim.AdamW(model.parameters(), fused=True, **settings)

    def step(self, samples: Sequence[Sample], batches: Sequence[Sequence[int]]) -> Figures:
        """Add up the losses of the batches of samples, and update; return what contenders are compared by.

        Computed tokens are those that passed through the model's layers, padding included.
        """
        loss, computed_tokens = 0.0, 0
        for partial_loss, num_tokens in self.partial_losses(samples, batches):
            partial_loss.backward()
            loss += partial_loss.item()
            computed_tokens += num_tokens
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.grad_clip)
        self._optimizer.step()
        # gcore keeps gradients allocated, too: they are in the memory before every contender's step, and in no peak.
        self._optimizer.zero_grad(set_to_none=False)
        return {"loss": loss, "grad_norm": grad_norm.item(), "computed_tokens": float(computed_tokens)}

    @abstractmethod
    def partial_losses(
        self, samples: Sequence[Sample], batches: Sequence[Sequence[int]]
    ) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the part of the loss that each batch makes up, and the number of its computed tokens."""


def padded(rows: Sequence[Any], *, side: str = "right") -> torch.Tensor:
    """Stack arrays of different lengths, with zeros after (or before) the shorter ones."""
    return pad_sequence([torch.from_numpy(row) for row in rows], batch_first=True, padding_side=side)
