"""Linear layers whose weights' gradients are added up in float32 by the matrix product itself, on CUDA.

Otherwise each micro-batch writes the gradient in half precision, converts it, and adds it to the sum of the others: 18
bytes of memory traffic a parameter, of which the sum's own 8 are left.
"""

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor


def accumulate_gradients(module: nn.Linear) -> Any:
    """Return a forward pass with the layer's results and gradients, which are rounded less often.

    The sum is the parameter's ``grad``, where it is there in float32 before the backward pass, as with `AdamW`:
    autograd, and hooks on the parameter, then see no gradient of it. Anything else is as in `torch.nn.Linear`.
    """

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return _Linear.apply(x, self.weight, self.bias)

    return MethodType(forward, module)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        # Not saved with it: a checkpointed layer would get a copy of the tensor, without its gradient.
        ctx.weight = weight
        ctx.bias = bias
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator is typed loosely
        ctx: Any, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        [x] = ctx.saved_tensors
        weight = ctx.weight
        bias = ctx.bias
        grad = grads[0]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = grad @ weight if needs_x else None
        grad_TO = grad.reshape(-1, grad.shape[-1])
        x_TI = x.reshape(-1, x.shape[-1])
        grad_weight = None
        grad_bias = None
        if needs_weight and _has_sum(weight):
            add_gradient(x_TI, grad_TO, weight.grad)
        elif needs_weight:
            grad_weight = grad_TO.T @ x_TI
        if needs_bias and _has_sum(bias):
            bias.grad += grad_TO.sum(0, dtype=torch.float32)
        elif needs_bias:
            grad_bias = grad_TO.sum(0)
        return grad_x, grad_weight, grad_bias


def add_gradient(x_TI: torch.Tensor, grad_TO: torch.Tensor, sum_OI: torch.Tensor) -> None:
    """Add a weight's gradient to the float32 sum of those before it."""
    if grad_TO.dtype == sum_OI.dtype:
        sum_OI.addmm_(grad_TO.T, x_TI)
    else:
        torch.addmm(sum_OI, grad_TO.T, x_TI, out_dtype=torch.float32, out=sum_OI)


def _has_sum(parameter: torch.Tensor) -> bool:
    grad = parameter.grad
    if grad is None or isinstance(grad, DTensor) or not grad.is_contiguous():
        return False
    return grad.dtype == torch.float32 and parameter.dtype in (torch.bfloat16, torch.float16)
