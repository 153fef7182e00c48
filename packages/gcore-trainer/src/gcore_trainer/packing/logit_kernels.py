"""Triton kernels that read a chunk's logits once for their softmax, and once for their gradient.

They compute what torch's operations in `head` do, which read and write float32 logits eleven and nine times. Shapes: C
tokens of a chunk, V vocabulary (of this rank, where it is divided).
"""

import logging
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

_logger = logging.getLogger(__name__)
_jit: Any = triton.jit
_BLOCK = 2048
"""Logits of a row that a program has in registers at a time."""
_WARPS = 4
_LOWEST: Any = tl.constexpr(-1e30)
"""Stands for no logit: exp() of it is 0, and 0 times it is 0, which 0 times -inf is not."""


@_jit
def _moments_kernel(
    logits_ptr: tl.tensor,
    peak_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    dot_ptr: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    # Of each lane, merged in the end: a reduction over lanes in every block would wait for all of them.
    peak = tl.full([block], _LOWEST, tl.float32)
    total = tl.zeros([block], tl.float32)
    dot = tl.zeros([block], tl.float32)
    for start in range(0, width, block):
        x = tl.load(
            logits_ptr + row * stride + start + columns, mask=start + columns < width, other=_LOWEST
        )
        x = tl.maximum(x, _LOWEST)
        higher = tl.maximum(peak, x)
        shift = peak - higher
        share = tl.exp(shift)
        part = tl.exp(x - higher)
        dot = (dot + total * shift) * share + part * (x - higher)
        total = total * share + part
        peak = higher
    top = tl.max(peak, axis=0)
    shift = peak - top
    share = tl.exp(shift)
    tl.store(peak_ptr + row, top)
    tl.store(sum_ptr + row, tl.sum(total * share, axis=0))
    tl.store(dot_ptr + row, tl.sum((dot + total * shift) * share, axis=0))


@_jit
def _gradient_kernel(
    logits_ptr: tl.tensor,
    out_ptr: tl.tensor,
    column_ptr: tl.tensor,
    log_sum_ptr: tl.tensor,
    pull_ptr: tl.tensor,
    entropy_ptr: tl.tensor,
    entropy_pull_ptr: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    has_entropy: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    mask = columns < width
    log_prob = tl.load(logits_ptr + row * stride + columns, mask=mask, other=_LOWEST) - tl.load(
        log_sum_ptr + row
    )
    prob = tl.exp(log_prob)
    # p - onehot first: with p near 1 the difference would be lost in a product that was rounded before.
    is_target = columns == tl.load(column_ptr + row)
    grad = (prob - tl.where(is_target, 1.0, 0.0)) * tl.load(pull_ptr + row)
    if has_entropy:
        pull = tl.maximum(log_prob, _LOWEST) + tl.load(entropy_ptr + row)
        grad += prob * pull * tl.load(entropy_pull_ptr + row)
    tl.store(out_ptr + row * width + columns, grad, mask=mask)


@torch.library.custom_op("gcore_trainer::logit_moments", mutates_args=())
def moments(logits_CV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row's largest logit x_max, sum of e^(x - x_max), and sum of (x - x_max) e^(x - x_max), [C] each."""
    num_rows, width = logits_CV.shape
    peak_C, sum_C, dot_C = _empty_moments(logits_CV)
    if num_rows:
        arguments = logits_CV, peak_C, sum_C, dot_C, logits_CV.stride(0), width
        _moments_kernel[(num_rows,)](*arguments, block=_BLOCK, num_warps=_WARPS)
    return peak_C, sum_C, dot_C


@moments.register_fake
def _empty_moments(logits_CV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    peak_C, sum_C, dot_C = (logits_CV.new_empty(logits_CV.shape[0]) for _ in range(3))
    return peak_C, sum_C, dot_C


@torch.library.custom_op("gcore_trainer::logit_gradient", mutates_args=())
def gradient(
    logits_CV: torch.Tensor,
    column_C: torch.Tensor,
    log_sum_C: torch.Tensor,
    pull_C: torch.Tensor,
    entropy_C: torch.Tensor | None,
    entropy_pull_C: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return pull (p - onehot(column)) + entropy_pull p (log p + entropy) of each row, [C, V] of ``dtype``.

    Args:
        column_C: a column outside of the row stands for none.
        entropy_C: None, as ``entropy_pull_C``: without the second term.
    """
    num_rows, width = logits_CV.shape
    out_CV = _empty_gradient(logits_CV, dtype)
    if num_rows:
        has_entropy = entropy_C is not None and entropy_pull_C is not None
        # Without entropies the kernel reads nothing of these two.
        entropies = (entropy_C, entropy_pull_C) if has_entropy else (log_sum_C, log_sum_C)
        rows = (x.contiguous() for x in (column_C, log_sum_C, pull_C, *entropies) if x is not None)
        arguments = logits_CV, out_CV, *rows, logits_CV.stride(0), width
        grid = num_rows, triton.cdiv(width, _BLOCK)
        _gradient_kernel[grid](*arguments, has_entropy=has_entropy, block=_BLOCK, num_warps=_WARPS)
    return out_CV


@gradient.register_fake
def _(logits_CV: torch.Tensor, *rows_and_dtype: Any) -> torch.Tensor:
    return _empty_gradient(logits_CV, rows_and_dtype[-1])


def _empty_gradient(logits_CV: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(logits_CV, dtype=dtype, memory_format=torch.contiguous_format)


@cache
def compile_on(device: torch.device) -> bool:
    """Return whether kernels are built for a device: Triton needs a C compiler for its launchers."""
    try:
        moments(torch.zeros(1, 1, device=device))
    except Exception as error:
        _logger.warning(
            "the head's kernels cannot be built, so that torch's slower operations are used: %s",
            error,
        )
        return False
    return True
