"""Tensors as numpy arrays of the same memory, and back."""

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import torch

from gcore_bench.ckpt.state import State

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def to_arrays(state: State) -> dict[str, Array]:
    """bfloat16 as ml_dtypes has it, which numpy itself lacks."""
    return {name: _to_array(tensor) for name, tensor in state.items()}


def to_state(arrays: dict[str, Array]) -> State:
    """The same memory as tensors."""
    return {name: _to_tensor(array) for name, array in arrays.items()}


def _to_array(tensor: torch.Tensor) -> Array:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _to_tensor(array: Array) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
