"""AdamW with float32 master copies of parameters of fewer bits, whose states may be in host memory."""

from collections.abc import Mapping
from typing import Any

import torch

from gcore_trainer.config import OptimizerConfig
from gcore_trainer.torch.host_memory import Arena, local, piece_bytes
from gcore_trainer.trainer import AdamW


class MasterAdamW(AdamW):
    """AdamW that updates float32 copies (masters), and rounds them to the parameters after each update.

    An update may be far below the resolution of bfloat16 (2^-8 of the parameter): masters sum such updates up.
    Gradients of all micro-batches are added in float32, too: of one process by autograd (`torch.Tensor.grad_dtype`),
    of ranks by FSDP after a reduce-scatter in float32. A trained bfloat16 parameter takes, of this rank's shards,

    - without offload 18 bytes on the device: the parameter (2), its gradient (4), master (4) and moments (8);
    - with offload 6 on the device, parameter and gradient, and 16 in host memory, where the gradient is copied to.

    A gradient in bfloat16 exists for one parameter at a time, on ranks for one layer. Parameters of float32 are their
    own masters: they take 16 bytes, with offload 8 and 16. Frozen parameters take their own bytes alone.

    With offload the fused kernel runs on the CPU: gradients go out (4 bytes a parameter) and parameters come back (2):
    6 bytes over PCIe, where masters and moments that visit the device are 24. The kernel reads and writes 28 bytes of
    host memory a parameter.

    Args:
        parameters: those that are trained, by name.
        offload: whether masters and moments are in (pinned) host memory.
    """

    def __init__(
        self, parameters: Mapping[str, torch.nn.Parameter], config: OptimizerConfig, *, offload: bool = False
    ) -> None:
        super().__init__({name: _master(p, is_copy=offload) for name, p in parameters.items()}, config)
        self.is_offloaded = offload
        self.parameters = dict(parameters)
        if offload:
            self._move_to_host(next(iter(parameters.values())).device)
        for parameter, master in self._pairs():
            parameter.grad_dtype = torch.float32
            # Both are on one device without offload, and share the gradient.
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float32) if offload else master.grad

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            assert parameter.grad is not None
            parameter.grad.zero_()

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._round()

    @torch.no_grad()
    def _step(self, lr: float) -> None:
        if self.is_offloaded:
            for parameter, master in self._pairs():
                _gradient(master).copy_(_gradient(parameter), non_blocking=True)
            if (device := next(iter(self.parameters.values())).device).type == "cuda":
                torch.cuda.synchronize(device)
        super()._step(lr)
        self._round()

    def _pairs(self) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        """Return the parameters that are not their own masters, and these."""
        return [(p, self._masters[name]) for name, p in self.parameters.items() if p is not self._masters[name]]

    @torch.no_grad()
    def _round(self) -> None:
        for parameter, master in self._pairs():
            target, source = local(parameter), local(master)
            if self.is_offloaded and source.dtype != target.dtype:
                # In the memory of the gradient, which is pinned, and of which half is enough.
                pinned = _gradient(master).view(-1).view(target.dtype)[: target.numel()].view_as(target)
                source = pinned.copy_(source)
            target.copy_(source, non_blocking=True)

    @torch.no_grad()
    def _move_to_host(self, device: torch.device) -> None:
        """Move masters, moments and the masters' gradients into one block of host memory."""
        moments = self._optimizer.state
        states = [
            local(tensor)
            for master in self._masters.values()
            for tensor in (master, moments[master]["exp_avg"], moments[master]["exp_avg_sq"], master.grad)
            if tensor is not None
        ]
        arena = Arena(sum(piece_bytes(own.nbytes) for own in states), device)
        for own in states:
            piece = arena.take(own.shape, own.dtype)
            piece.copy_(own)
            own.set_(piece.untyped_storage(), piece.storage_offset(), piece.shape, piece.stride())


def _master(parameter: torch.nn.Parameter, *, is_copy: bool) -> torch.nn.Parameter:
    if parameter.dtype in (torch.float32, torch.float64) and not is_copy:
        return parameter
    device = torch.device("cpu") if is_copy else parameter.device
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return torch.nn.Parameter(parameter.detach().to(device, dtype, copy=True))


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return local(parameter.grad)
