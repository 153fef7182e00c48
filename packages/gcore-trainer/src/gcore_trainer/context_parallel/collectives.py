"""Differentiable exchanges between the ranks of a context-parallel group.

Shapes: U ranks of a group, T tokens of the row or ring shard, H query heads, K key-value heads, D head dimension.
"""

import math
from typing import Any

import torch
import torch.distributed as dist

from gcore_trainer.errors import ConfigError


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, parts: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _exchanged(grad_outputs[0], ctx.group)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, values: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 - torch hands it over
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, torch.Tensor]:  # noqa: ARG004 - torch hands it over
        return None, grad_outputs[0]


def scatter_heads(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Exchange a slice of the tokens with all heads for all tokens with a slice of the heads.

    DeepSpeed-Ulysses, arXiv:2309.14509, section 3.1. All tensors travel in one message.

    Args:
        tensors: each [T / U, heads, D] of its own heads and D; U divides the heads.
        group: whose ranks hold consecutive slices of the tokens.

    Returns:
        [T, heads / U, D] of each.
    """
    size = group.size()
    parts = [x.unflatten(1, (size, -1)).transpose(0, 1) for x in tensors]
    message = torch.cat([part.flatten(2) for part in parts], dim=-1)
    received = _AllToAll.apply(group, message).flatten(0, 1)
    widths = [part.shape[2] * part.shape[3] for part in parts]
    return [x.unflatten(-1, part.shape[2:]) for x, part in zip(received.split(widths, dim=-1), parts, strict=True)]


def gather_heads(x_THD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Invert `scatter_heads`: from [T, H / U, D] to [T / U, H, D]."""
    received: torch.Tensor = _AllToAll.apply(group, x_THD.unflatten(0, (group.size(), -1)))
    return received.transpose(0, 1).flatten(1, 2)


def repeat_for_ranks(x_TKD: torch.Tensor, *, num_query_heads: int, size: int) -> torch.Tensor:
    """Repeat key-value heads until `size` ranks divide them, each head next to its query heads.

    Raises:
        ConfigError: the ranks do not divide the query heads.
    """
    if num_query_heads % size:
        raise ConfigError(
            f"ulysses_size is {size}; expected a divisor of the {num_query_heads} query heads of attention"
        )
    num_heads = x_TKD.shape[1]
    return x_TKD.repeat_interleave(math.lcm(num_heads, size) // num_heads, dim=1)


def sum_over_ranks(values_N: torch.Tensor, *groups: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum the ranks' values [N] on all of them; the gradient passes unchanged.

    For ranks that each compute some entries, leave the others 0, and then compute the same loss of all: each
    back-propagates what the loss says of its own entries. The parameters' gradients are then to be summed over ranks.
    A rank that has no entries goes backward too: its attention passes on the gradients of others.

    Args:
        values_N: this rank's.
        groups: summed over one after the other; None stands for this rank alone.
    """
    for group in groups:
        if group is not None:
            values_N = _SumOverRanks.apply(group, values_N)
    return values_N


def _exchanged(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received
