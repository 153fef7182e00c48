"""Less memory for activations: checkpointed layers, and activations in host memory."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from gcore_trainer.torch.host_memory import local

LARGE_MODEL = 1_000_000_000
"""Parameters from which ``auto`` checkpoints layers on CUDA.

Without it, a layer of a Llama keeps 18 D + 8 D_q + 8 D_kv + 8 F bytes a token in bfloat16, with hidden size D,
sizes D_q and D_kv of all query and key heads, and F of the MLP: 52 GB at 1.5B, 28 layers and 16,384 tokens, 25 at 0.5B.
A checkpointed layer keeps 2 D, its input, and one layer at a time is computed again.
"""
_SMALL = 1 << 20
"""Activations of fewer bytes stay on the device."""


def is_checkpointed(
    setting: bool | Literal["auto"], model: torch.nn.Module, device: torch.device
) -> bool:
    """Return whether to checkpoint a model's layers; ``auto``: if the model is large and on CUDA."""
    if setting != "auto":
        return setting
    return device.type == "cuda" and sum(p.numel() for p in model.parameters()) >= LARGE_MODEL


def checkpoint_layers(layers: Sequence[torch.nn.Module], share: float) -> None:
    """Checkpoint the first ``share`` of the layers: keep only their inputs, and compute them again.

    Nothing in a layer is random, since models in training are in ``eval`` mode, without dropout.
    """
    for layer in layers[: round(share * len(layers))]:
        layer.forward = partial(
            checkpoint,
            layer.forward,
            use_reentrant=False,
            preserve_rng_state=False,
            determinism_check="none",
        )


def offload_activations(module: torch.nn.Module, *, smallest_bytes: int = _SMALL) -> None:
    """Keep the tensors that a module saves for its backward pass in (pinned) host memory.

    Parameters and small tensors stay. Of a checkpointed layer that is its input: 2 D bytes a token each way over PCIe.
    """
    forward = module.forward
    weights: set[int] = set()

    def note(module: torch.nn.Module, args: Any) -> None:
        del args
        # What FSDP gathers for a pass is there when the pass starts.
        weights.update(_address(p) for p in module.parameters(recurse=False))

    for part in module.modules():
        part.register_forward_pre_hook(note)

    def pack(tensor: torch.Tensor) -> torch.Tensor | tuple[torch.device, torch.Tensor]:
        if tensor.nbytes < smallest_bytes or _address(tensor) in weights:
            return tensor
        # In the order of the device's stream, on which its memory is used again.
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
        return tensor.device, host.copy_(tensor, non_blocking=True)

    def forward_offloaded(*args: Any, **kwargs: Any) -> Any:
        weights.clear()
        weights.update(_address(p) for p in module.parameters())
        with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
            return forward(*args, **kwargs)

    module.forward = forward_offloaded


def _address(tensor: torch.Tensor) -> int:
    return local(tensor).untyped_storage().data_ptr()


def _unpack(packed: torch.Tensor | tuple[torch.device, torch.Tensor]) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    device, host = packed
    return host.to(device, non_blocking=True)
