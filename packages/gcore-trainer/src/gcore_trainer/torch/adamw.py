"""AdamW over named parameters, whole or sharded, whose state is saved under their names."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from gcore_trainer.config import OptimizerConfig


class AdamW:
    """torch's fused AdamW, with gradients and moments from the start, so that a checkpoint can be loaded into them.

    Args:
        parameters: by their names in a checkpoint.
        config: see `OptimizerConfig`.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig) -> None:
        self.parameters = dict(parameters)
        self._grad_clip = config.grad_clip
        self._optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
            self._optimizer.state[parameter] = {
                # The fused kernel reads the count on the parameter's device.
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    @property
    def num_updates(self) -> int:
        """Number of updates that the moments have seen."""
        return max((int(s["step"]) for s in self._optimizer.state.values()), default=0)

    def zero_grad(self) -> None:
        """Set the gradients to 0, in place."""
        self._optimizer.zero_grad(set_to_none=False)

    def update(self, lr: float) -> float:
        """Clip the gradient and update if its norm is finite; return the norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self._grad_clip)
        grad_norm = whole(norm).item()
        if np.isfinite(grad_norm):
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        return grad_norm

    def tensors(self) -> dict[str, dict[str, Any]]:
        """Return ``model``, ``exp_avg`` and ``exp_avg_sq``: live tensors by name."""
        moments = self._optimizer.state
        return {
            "model": {name: p.detach() for name, p in self.parameters.items()},
            "exp_avg": {name: moments[p]["exp_avg"] for name, p in self.parameters.items()},
            "exp_avg_sq": {name: moments[p]["exp_avg_sq"] for name, p in self.parameters.items()},
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Copy the tensors of a state, and its ``optimizer_step``."""
        for group, own in self.tensors().items():
            for name, tensor in own.items():
                tensor.copy_(state[group][name])
        for moments in self._optimizer.state.values():
            moments["step"].fill_(float(state["optimizer_step"]))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor that may be sharded; all ranks call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
