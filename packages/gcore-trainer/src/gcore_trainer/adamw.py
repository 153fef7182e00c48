"""torch's AdamW with moments that exist from the start, and the gathering of sharded tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from gcore_trainer.config import OptimizerConfig


class AdamW:
    """torch's fused AdamW with gradients and moments from the start, into which a checkpoint can be loaded."""

    is_offloaded = False  # whether its states are in host memory

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig
    ) -> None:
        self.parameters = self._masters = dict(parameters)
        self.num_updates = 0
        """Updates that the moments have seen."""
        self._grad_clip = config.grad_clip
        for parameter in self.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer = torch.optim.AdamW(
            [{"params": self._with_exact_moments()}],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        for parameter in self._optimizer.param_groups[0]["params"]:
            moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            # The fused kernel reads the count on the parameter's device.
            moments["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            self._optimizer.state[parameter] = moments

    def _with_exact_moments(self) -> list[torch.nn.Parameter]:
        """Return the parameters whose moments are of their own data type: all."""
        return list(self.parameters.values())

    def zero_grad(self) -> None:
        """Set the gradients to 0, in place."""
        self._optimizer.zero_grad(set_to_none=False)

    def update(self, lr: float) -> float:
        """Clip the gradient and update if its norm is finite; return the norm before clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self._grad_clip)
        grad_norm = gather_full_tensor(norm).item()
        if np.isfinite(grad_norm):
            self._step(lr)
        return grad_norm

    def _step(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.num_updates += 1

    def tensors(self) -> dict[str, dict[str, Any]]:
        """Return ``model``, ``exp_avg`` and ``exp_avg_sq`` as in `BaseTrainer.state`."""
        groups: dict[str, dict[str, Any]] = {"model": {}, "exp_avg": {}, "exp_avg_sq": {}}
        for name, master in self._masters.items():
            groups["model"][name] = master.detach()
            for key in ("exp_avg", "exp_avg_sq"):
                groups[key][name] = self._moment(name, key)
        return groups

    def _moment(self, name: str, key: str) -> torch.Tensor:
        """Return a parameter's moment."""
        return self._optimizer.state[self._masters[name]][key]

    stored_tensors = tensors
    """Return the tensors that stay in memory between updates, by groups and names."""

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Take over the tensors of a state that was checked, and its ``optimizer_step``."""
        self.num_updates = int(state["optimizer_step"])
        for group, tensors in self.tensors().items():
            for name, tensor in tensors.items():
                tensor.copy_(state[group][name])
        for moments in self._optimizer.state.values():
            moments["step"].fill_(float(self.num_updates))


def gather_full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of one that may be sharded; all ranks call it."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor
