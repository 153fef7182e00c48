"""Weights of another process on the same GPU, opened in place by CUDA IPC, without a copy."""

import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

_DEVICE_ARGUMENT = 6
"""Index of the argument of `rebuild_cuda_tensor` that is the sender's number of the device."""


class SharedCudaWeights:
    """The side that has the weights: Hugging Face names and full tensors on a CUDA device; `ValueError` for others.

    It waits for pending computations, keeps the weights alive until `close`, and must not write to them before. Call
    `close` only once every receiver has copied the weights and released its views.
    """

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = [(name, tensor.detach()) for name, tensor in weights]
        for name, tensor in self._tensors:
            if not tensor.is_cuda:
                raise ValueError(f"weight {name!r} is on {tensor.device}; expected a CUDA device")
        for device in {tensor.device for _, tensor in self._tensors}:
            torch.cuda.synchronize(device)

    def handles(self) -> bytes:
        """Return the handles that one receiver opens once; each receiver must trust this process."""
        return pickle.dumps([(name, _uuid(tensor.device), reduce_tensor(tensor)[1]) for name, tensor in self._tensors])

    def close(self) -> None:
        """Release the weights. Idempotent."""
        self._tensors.clear()
        torch.cuda.ipc_collect()


def open_weights(handles: bytes) -> list[tuple[str, torch.Tensor]]:
    """Open the sender's weights: names and views of its memory, which must not be written to.

    Devices are matched by their UUID, because the two processes may number them differently. Copy the needed tensors,
    wait for the copies (``torch.cuda.synchronize``), drop the views, and notify the sender, which must be trusted, as
    with every pickle. `ValueError` if this process does not see the sender's GPU.
    """
    own = {_uuid(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())}
    opened: list[tuple[str, torch.Tensor]] = []
    for name, uuid, arguments in pickle.loads(handles):
        if uuid not in own:
            raise ValueError(f"weight {name!r} is on GPU {uuid}: this process sees {sorted(own)}")
        given: list[Any] = list(arguments)
        given[_DEVICE_ARGUMENT] = own[uuid]
        opened.append((name, rebuild_cuda_tensor(*given)))
    return opened


def _uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
