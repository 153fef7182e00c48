"""Check that a saved state fits a trainer."""

from collections.abc import Mapping
from typing import Any

import torch

from gcore_trainer.errors import StateError


def check_state(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise `StateError` if names or shapes of a saved state differ from the ``expected`` state of the trainer."""
    difference = sorted(state.keys() ^ expected.keys())
    if difference:
        raise StateError(
            f"state does not match this trainer's: names on one side only: {difference}"
        )
    for group, tensors in expected.items():
        if not isinstance(tensors, dict):
            continue
        difference = sorted(state[group].keys() ^ tensors.keys())
        if difference:
            raise StateError(
                f"{group} does not match the model: names on one side only: {difference[:3]}"
            )
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and state[group][name].shape != tensor.shape:
                raise StateError(
                    f"{group}[{name!r}] has shape {tuple(state[group][name].shape)}; expected {tuple(tensor.shape)}"
                )
