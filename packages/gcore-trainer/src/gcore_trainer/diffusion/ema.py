"""A moving average of weights, for policies that learn in large steps."""

from collections.abc import Mapping

import torch

from gcore_trainer.config import require


class MovingAverage:
    """Exponential moving average of parameters, in float32, sharded as they are.

    Args:
        parameters: by name.
        decay: fraction that the average keeps of itself at an update. Early on it is less: (1 + n) / (10 + n) after n
            updates, as in TensorFlow's and diffusers' averages.

    Raises:
        ConfigError: a decay out of its bounds.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], decay: float) -> None:
        require("ema_decay", decay, 0 <= decay < 1, "a number in [0, 1)")
        self._parameters = dict(parameters)
        self._decay = decay
        self.tensors: dict[str, torch.Tensor] = {n: p.detach().clone() for n, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, num_updates: int) -> None:
        """Include the parameters after a number of updates."""
        decay = min(self._decay, (1 + num_updates) / (10 + num_updates))
        self.move(1 - decay)

    @torch.no_grad()
    def move(self, fraction: float) -> None:
        """Move towards the parameters by a fraction of the distance."""
        for name, parameter in self._parameters.items():
            self.tensors[name].lerp_(parameter.detach(), fraction)
