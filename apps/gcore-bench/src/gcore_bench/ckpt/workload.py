"""The state that every contender saves: each process can make any tensor of the same bytes."""

import math
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch

State: TypeAlias = dict[str, torch.Tensor]

_WIDTH = 1024
_TINY_ELEMENTS = 2048
_PERIOD = 4_194_301
"""Number of elements after which values repeat: a prime, so that no two pages of a tensor are equal."""


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """Name, dtype and shape of a tensor; its values follow from its number."""

    name: str
    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def full(self) -> torch.Tensor:
        """Return the whole tensor."""
        at, count = self.number * 1_234_577 % _PERIOD, math.prod(self.shape)
        noise = _noise(self.dtype).repeat(-(-(at + count) // _PERIOD))
        return noise[at : at + count].clone().view(self.shape)


@cache
def _noise(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(_PERIOD, generator=torch.Generator().manual_seed(0)).to(dtype)


def plan_state(size_bytes: int, num_tensors: int) -> list[TensorPlan]:
    """Plan a state of at least ``size_bytes``: 2 % large tensors with 40 % of the bytes, 30 % tiny, the rest medium."""
    num_large = max(1, num_tensors // 50)
    num_tiny = num_tensors * 3 // 10
    num_medium = num_tensors - num_large - num_tiny
    kinds = ["large"] * num_large + ["medium"] * num_medium + ["tiny"] * num_tiny
    bytes_of = {"large": 0.4 * size_bytes / num_large, "medium": 0.6 * size_bytes / num_medium}
    plans: list[TensorPlan] = []
    for number, kind in enumerate(kinds):
        dtype = torch.float32 if number % 2 else torch.bfloat16
        rows = math.ceil(bytes_of.get(kind, 0) / (_WIDTH * dtype.itemsize))
        shape = (_TINY_ELEMENTS,) if kind == "tiny" else (rows, _WIDTH)
        plans.append(TensorPlan(name=f"layers.{number}.{kind}", number=number, dtype=dtype, shape=shape))
    # Sizes alternate, as in a model.
    return sorted(plans, key=lambda plan: (plan.number * 37) % num_tensors)


def small_state(count: int) -> State:
    """Return tensors of 8 floats, each with memory of its own, such as the biases of many small layers."""
    rows = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return {f"layers.{number}.bias": row.clone() for number, row in enumerate(rows)}


def is_same(found: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """Return whether dtype, shape and every bit are equal."""
    if found is None or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return torch.equal(byte_view(found), byte_view(expected))


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as bytes; it is copied only if it is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
