"""A moving average of weights: what is shown and kept of a policy that learns in large steps."""

from collections.abc import Mapping

import torch

from gcore_trainer.checks import require


class MovingAverage:
    """Exponential moving average of parameters, in float32, sharded as they are.

    Args:
        parameters: by name.
        decay: what the average keeps of itself at an update. Early on it keeps less: (1 + n) / (10 + n) after n
            updates, as in TensorFlow's and diffusers' averages.

    Raises:
        ConfigError: a decay that is none.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], decay: float) -> None:
        require("ema_decay", decay, 0 <= decay < 1, "a number in [0, 1)")
        self._parameters = dict(parameters)
        self._decay = decay
        self.tensors: dict[str, torch.Tensor] = {n: p.detach().clone() for n, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, num_updates: int) -> None:
        """Take in the parameters after so many updates."""
        decay = min(self._decay, (1 + num_updates) / (10 + num_updates))
        self.move(1 - decay)

    @torch.no_grad()
    def move(self, share: float) -> None:
        """Move towards the parameters by a share of the distance."""
        for name, parameter in self._parameters.items():
            self.tensors[name].lerp_(parameter.detach(), share)
