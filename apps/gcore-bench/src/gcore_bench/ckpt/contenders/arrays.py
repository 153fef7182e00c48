"""Conversion between tensors and numpy arrays that share their memory."""

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import torch

from gcore_bench.ckpt.workload import State

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def to_arrays(state: State) -> dict[str, Array]:
    """View tensors as arrays; bfloat16, which numpy lacks, is the dtype of ml_dtypes."""
    return {name: _to_array(tensor) for name, tensor in state.items()}


def to_state(arrays: dict[str, Array]) -> State:
    """View arrays as tensors."""
    return {name: _to_tensor(array) for name, array in arrays.items()}


def _to_array(tensor: torch.Tensor) -> Array:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _to_tensor(array: Array) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
