"""Rotary embeddings whose frequencies depend on the length of the row that they are computed for.

transformers chooses the factors of ``longrope`` (LongRoPE, arXiv 2402.13753) and the base of ``dynamic`` by the largest
position of its input, so a sequence's log-probabilities would depend on its neighbours in a packed row. Here the choice
is made once, for the longest sequence of the run. vLLM chooses likewise, by ``max_model_len``.
"""

from collections.abc import Iterator
from typing import Any

import torch

from gcore_trainer.errors import UnsupportedModelError


def freeze_rope(model: torch.nn.Module, max_length: int | None) -> bool:
    """Make rotary embeddings choose their frequencies as for a sequence of ``max_length`` tokens.

    Args:
        model: of transformers.
        max_length: tokens of the longest prompt and response of the run.

    Returns:
        whether the model has such embeddings; if so, it must not see longer sequences.

    Raises:
        UnsupportedModelError: the model has such embeddings and ``max_length`` is None, or more than the model's
            ``max_position_embeddings`` for ``dynamic``.
    """
    found = list(_length_dependent(model))
    for module, rope_type in found:
        if max_length is None:
            raise UnsupportedModelError(
                f"max_length is None; expected the longest prompt and response in tokens: rope_type {rope_type!r} "
                "depends on it"
            )
        limit: int = module.config.max_position_embeddings
        if "dynamic" in rope_type and max_length > limit:
            raise UnsupportedModelError(
                f"max_length is {max_length}; expected at most max_position_embeddings = {limit} for rope_type "
                f"{rope_type!r}, which changes with every longer token"
            )
        module.forward = _Frozen(module.forward, max_length)
    return bool(found)


class _Frozen:
    """The forward pass of a rotary embedding, with one more position: the last of the longest sequence."""

    def __init__(self, forward: Any, max_length: int) -> None:
        self._forward = forward
        self._last = max_length - 1

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        last = position_ids.new_full((*position_ids.shape[:-1], 1), self._last)
        angles = self._forward(x, torch.cat([position_ids, last], dim=-1), *args, **kwargs)
        if isinstance(angles, torch.Tensor):
            return angles[..., :-1, :]
        return tuple(part[..., :-1, :] for part in angles)


def _length_dependent(model: torch.nn.Module) -> Iterator[tuple[Any, str]]:
    for module in model.modules():
        own: Any = getattr(module, "rope_type", None)
        types: list[Any] = list(own.values()) if isinstance(own, dict) else [own]
        for rope_type in types:
            if isinstance(rope_type, str) and (rope_type == "longrope" or "dynamic" in rope_type):
                yield module, rope_type
                break
