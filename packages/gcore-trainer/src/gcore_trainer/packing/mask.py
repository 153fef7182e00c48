"""The masks that transformers' models ask for in a packed row, described instead of computed.

A packed row's attention follows its plan, so a mask [T, T] is never made. A mask can still hide more than causality
does: a sliding window, for example. transformers reports what it wants to hide to the mask function of the attention
implementation, and `describe` keeps that report in the mask's place, where `window_of` reads it.
"""

from collections.abc import Callable, Iterator
from inspect import getclosurevars
from typing import Any

import torch

from gcore_trainer.errors import UnsupportedModelError

# Functions of transformers.masking_utils that hide tokens, by the name of the function that makes or is them.
_CAUSAL, _WINDOW, _PACKED = "causal_mask_function", "sliding_window_overlay", "packed_sequence_mask_function"
_CONJUNCTION = "and_masks"


class DescribedMask(torch.Tensor):
    """A mask [B, 1, Lq, Lk] that occupies no memory. The result of any operation on it is an ordinary tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType, reportPrivateUsage]
    hides: frozenset[str]
    """Names of the functions of ``transformers.masking_utils`` that hide tokens, and of any others."""
    window: int | None
    """Sliding window in tokens; None: there is none."""


def describe(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **others: Any,
) -> DescribedMask:
    """Describe a mask; the arguments are those of ``transformers.masking_utils.sdpa_mask``."""
    del others
    mask = torch.ones((), dtype=torch.bool, device=device).expand(batch_size, 1, q_length, kv_length)
    described = mask.as_subclass(DescribedMask)
    described.hides = frozenset(_names(mask_function))
    described.window = local_size if _WINDOW in described.hides else None
    return described


def window_of(mask: torch.Tensor) -> int | None:
    """Return the sliding window of a mask, in tokens.

    Raises:
        UnsupportedModelError: the mask hides other tokens than causality and a sliding window do.
    """
    if not isinstance(mask, DescribedMask):
        raise UnsupportedModelError(
            f"the model computes an attention mask of its own, {list(mask.shape)}: packed training does not apply it"
        )
    unknown = sorted(mask.hides - {_CAUSAL, _WINDOW, _PACKED})
    if unknown or _CAUSAL not in mask.hides:
        raise UnsupportedModelError(
            f"the model's attention mask is made by {', '.join(unknown)}: packed training computes causal attention "
            "and sliding windows only"
        )
    return mask.window


def _names(mask_function: Callable[..., Any]) -> Iterator[str]:
    name = mask_function.__qualname__.partition(".")[0]
    if name != _CONJUNCTION:
        yield name
        return
    for part in getclosurevars(mask_function).nonlocals["mask_functions"]:
        yield from _names(part)
