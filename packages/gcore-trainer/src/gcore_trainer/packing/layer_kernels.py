"""Triton kernels for the operations of a transformer's layer between its matrix products, on CUDA.

Each is one call, forward and backward, where torch has up to twelve operations that all read and write the activations.
Products and sums are in float32, and what is stored is rounded to its type. Shapes: T tokens, H heads, D dimension of a
head, F size of the MLP.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_GELU: Any = tl.constexpr(2 * (2 / math.pi) ** 0.5)
"""gelu(x) by tanh is x * sigmoid(_GELU * (x + _GELU_CUBIC * x^3)), as silu(x) is x * sigmoid(x)."""
_GELU_CUBIC: Any = tl.constexpr(0.044715)
_jit: Any = triton.jit


@_jit
def _gated_kernel(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    size: tl.tensor,
    is_gelu: tl.constexpr,
    block: tl.constexpr,
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = offsets < size
    gate = tl.load(gate_ptr + offsets, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask).to(tl.float32)
    exponent = gate
    if is_gelu:
        exponent = gate * (_GELU + _GELU * _GELU_CUBIC * gate * gate)
    # Rounded as torch does between its two operations, so that both give the same result.
    active = (gate * tl.sigmoid(exponent)).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + offsets, active * up, mask=mask)


@_jit
def _gated_gradients_kernel(
    grad_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    grad_gate_ptr: tl.tensor,
    grad_up_ptr: tl.tensor,
    size: tl.tensor,
    is_gelu: tl.constexpr,
    block: tl.constexpr,
) -> None:
    offsets = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = offsets < size
    grad = tl.load(grad_ptr + offsets, mask=mask).to(tl.float32)
    gate = tl.load(gate_ptr + offsets, mask=mask).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=mask).to(tl.float32)
    exponent = gate
    rise = 1.0
    if is_gelu:
        exponent = gate * (_GELU + _GELU * _GELU_CUBIC * gate * gate)
        rise = _GELU + 3 * _GELU * _GELU_CUBIC * gate * gate
    sigmoid = tl.sigmoid(exponent)
    tl.store(grad_up_ptr + offsets, grad * gate * sigmoid, mask=mask)
    slope = sigmoid + gate * sigmoid * (1 - sigmoid) * rise
    tl.store(grad_gate_ptr + offsets, grad * up * slope, mask=mask)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, is_gelu: bool) -> torch.Tensor:
        gate = gate.contiguous()
        up = up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.is_gelu = is_gelu
        out = torch.empty_like(gate)
        grid = (triton.cdiv(gate.numel(), _BLOCK),)
        _gated_kernel[grid](gate, up, out, gate.numel(), is_gelu=is_gelu, block=_BLOCK)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_gate = torch.empty_like(gate)
        grad_up = torch.empty_like(up)
        size = gate.numel()
        grid = (triton.cdiv(size, _BLOCK),)
        _gated_gradients_kernel[grid](
            grad, gate, up, grad_gate, grad_up, size, is_gelu=ctx.is_gelu, block=_BLOCK
        )
        return grad_gate, grad_up, None


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up [..., F], differentiably (Shazeer, arXiv:2002.05202)."""
    return _Gated.apply(gate, up, False)


def geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute gelu(gate) * up [..., F], differentiably, with gelu's approximation by tanh (arXiv:1606.08415)."""
    return _Gated.apply(gate, up, True)


@_jit
def _rotate_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    stride_token: tl.tensor,
    stride_head: tl.tensor,
    num_heads: tl.tensor,
    half: tl.constexpr,
    is_inverse: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, block_heads)[:, None]
    columns = tl.arange(0, block_half)[None, :]
    mask = (heads < num_heads) & (columns < half)
    pointers = x_ptr + token * stride_token + heads * stride_head + columns
    first = tl.load(pointers, mask=mask).to(tl.float32)
    second = tl.load(pointers + half, mask=mask).to(tl.float32)
    angles = token * 2 * half + columns
    is_column = columns < half
    cos_first = tl.load(cos_ptr + angles, mask=is_column).to(tl.float32)
    cos_second = tl.load(cos_ptr + angles + half, mask=is_column).to(tl.float32)
    sin_first = tl.load(sin_ptr + angles, mask=is_column).to(tl.float32)
    sin_second = tl.load(sin_ptr + angles + half, mask=is_column).to(tl.float32)
    if is_inverse:
        one = first * cos_first + second * sin_second
        two = second * cos_second - first * sin_first
    else:
        one = first * cos_first - second * sin_first
        two = second * cos_second + first * sin_second
    out = out_ptr + (token * num_heads + heads) * 2 * half + columns
    tl.store(out, one, mask=mask)
    tl.store(out + half, two, mask=mask)


def _rotate(
    x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor, *, is_inverse: bool
) -> torch.Tensor:
    num_tokens, num_heads, head_dim = x_THD.shape
    if x_THD.stride(2) != 1:
        x_THD = x_THD.contiguous()
    out_THD = torch.empty((num_tokens, num_heads, head_dim), dtype=x_THD.dtype, device=x_THD.device)
    half = head_dim // 2
    _rotate_kernel[(num_tokens,)](
        x_THD,
        out_THD,
        cos_TD,
        sin_TD,
        x_THD.stride(0),
        x_THD.stride(1),
        num_heads,
        half=half,
        is_inverse=is_inverse,
        block_heads=triton.next_power_of_2(num_heads),
        block_half=triton.next_power_of_2(half),
    )
    return out_THD


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_THD: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cos_TD, sin_TD)
        return _rotate(x_THD, cos_TD, sin_TD, is_inverse=False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos_TD, sin_TD = ctx.saved_tensors
        return _rotate(grads[0], cos_TD, sin_TD, is_inverse=True), None, None


def rotate(
    q_1HTD: torch.Tensor, k_1KTD: torch.Tensor, cos_1TD: torch.Tensor, sin_1TD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys by their positions (RoPE, arXiv:2104.09864), as ``apply_rotary_pos_emb`` of transformers.

    Pairs are of the two halves of a head. Results are views [1, H, T, D] of memory that is [T, H, D].
    """
    cos_TD = cos_1TD[0].contiguous()
    sin_TD = sin_1TD[0].contiguous()
    q_THD: Any = _Rotation.apply(q_1HTD[0].transpose(0, 1), cos_TD, sin_TD)
    k_TKD: Any = _Rotation.apply(k_1KTD[0].transpose(0, 1), cos_TD, sin_TD)
    return q_THD.transpose(0, 1)[None], k_TKD.transpose(0, 1)[None]
