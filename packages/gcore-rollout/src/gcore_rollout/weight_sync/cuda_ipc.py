"""Weights of another process on the same GPU, opened where they lie (CUDA IPC): nothing is copied on the way."""

import pickle
from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

_DEVICE_ARGUMENT = 6
"""Of `rebuild_cuda_tensor`: the number that the sender has for the device."""


class SharedCudaWeights:
    """The side that has the weights. It keeps them alive until `close`, and must not write to them before.

    Call `close` only once every receiver has said that it has copied the weights and let go of its views; how it says
    so is the caller's (the end of the call that took the handles will do).

    Args:
        weights: Hugging Face names and full tensors on a CUDA device. What is still being computed is waited for.

    Raises:
        ValueError: a tensor is elsewhere.
    """

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = [(name, tensor.detach()) for name, tensor in weights]
        for name, tensor in self._tensors:
            if not tensor.is_cuda:
                raise ValueError(f"weight {name!r} is on {tensor.device}; expected a CUDA device")
        for device in {tensor.device for _, tensor in self._tensors}:
            torch.cuda.synchronize(device)

    def handles(self) -> bytes:
        """What a receiver opens, once: each gets a message of its own. To be sent to processes that trust this one."""
        return pickle.dumps([(name, _uuid(tensor.device), reduce_tensor(tensor)[1]) for name, tensor in self._tensors])

    def close(self) -> None:
        """Let go of the weights. Idempotent."""
        self._tensors.clear()
        torch.cuda.ipc_collect()


def open_weights(handles: bytes) -> list[tuple[str, torch.Tensor]]:
    """The side that gets the weights: names and views of the sender's memory, not to be written to.

    Devices are matched by their UUID, for the two processes may number them differently. Copy what is needed, wait for
    the copies (``torch.cuda.synchronize``), drop the views, and then tell the sender.

    Args:
        handles: from a process that is trusted, as with every pickle.

    Raises:
        ValueError: this process does not see the sender's GPU.
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
