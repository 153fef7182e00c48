"""The check that a state fits the trainer that is to continue from it."""

from collections.abc import Mapping
from typing import Any

import torch

from gcore_trainer.errors import StateError


def check_state(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise `StateError` if names or shapes of a trainer's state differ from those of the trainer's own."""
    if difference := sorted(state.keys() ^ own.keys()):
        raise StateError(f"state does not match this trainer's: names on one side only: {difference}")
    for group, tensors in own.items():
        if not isinstance(tensors, dict):
            continue
        if difference := sorted(state[group].keys() ^ tensors.keys()):
            raise StateError(f"{group} does not match the model: names on one side only: {difference[:3]}")
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and state[group][name].shape != tensor.shape:
                raise StateError(
                    f"{group}[{name!r}] has shape {tuple(state[group][name].shape)}; expected {tuple(tensor.shape)}"
                )
