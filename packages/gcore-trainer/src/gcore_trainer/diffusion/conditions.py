"""The arguments that a model is given for images, and how its outputs become what the sampler's scheduler is given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gcore_trainer.diffusion.sample import Conditions, DiffusionSample

_LISTED = "[]"


@dataclass(frozen=True, kw_only=True)
class Conditioned:
    """Inputs of a model for B images, besides latents and timesteps.

    With guidance there are 2B rows: the images without their prompts, then with them.
    """

    calls: list[tuple[list[int], dict[str, Any]]]
    """Rows of inputs of equal shapes, which make up one call, and its arguments."""
    guidance_scale: float | None
    keeps_norm: bool
    is_negated: bool

    @classmethod
    def of(cls, samples: Sequence[DiffusionSample], device: torch.device) -> "Conditioned":
        """Collect those of a micro-batch, whose images were made with the same settings."""
        first = samples[0]
        rows = _rows(samples)
        return cls(
            calls=[(places, _arguments([rows[i] for i in places], device)) for places in _places(rows).values()],
            guidance_scale=first.guidance_scale,
            keeps_norm=first.keeps_norm,
            is_negated=first.is_negated,
        )

    def combined(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return what the scheduler was given for the outputs [B or 2B, ...] of all rows: [B, ...]."""
        combined = with_prompt = outputs
        if self.guidance_scale is not None:
            without, with_prompt = outputs.chunk(2)
            combined = without + self.guidance_scale * (with_prompt - without)
        if self.keeps_norm:
            norms = [torch.linalg.vector_norm(each, dim=-1, keepdim=True) for each in (with_prompt, combined)]
            combined = combined * (norms[0] / norms[1])
        return -combined if self.is_negated else combined


def with_appended(latents: torch.Tensor, arguments: Mapping[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return latents with what follows them along an axis, and the other arguments of a call."""
    others: dict[str, Any] = {}
    for name, value in arguments.items():
        _, is_appended, axis = name.partition("+")
        if is_appended:
            latents = torch.cat([latents, value], int(axis))
        else:
            others[name] = value
    return latents, others


def num_calls(samples: Sequence[DiffusionSample]) -> int:
    """Return the number of calls that a model needs for images: one for each set of shapes of their conditions."""
    return len(_places(_rows(samples)))


_Row = tuple[Conditions, Conditions]
"""The conditions of an image's pass, and those that are shared."""


def _rows(samples: Sequence[DiffusionSample]) -> list[_Row]:
    with_prompt = [(s.conditions, s.shared_conditions) for s in samples]
    if samples[0].guidance_scale is None:
        return with_prompt
    return [(s.negative_conditions or {}, s.shared_conditions) for s in samples] + with_prompt


def _places(rows: Sequence[_Row]) -> dict[Any, list[int]]:
    """Return the places of the rows that fit in one call."""
    found: dict[Any, list[int]] = {}
    # Most rows share one object, whose content is read once.
    arrays = {id(v): v for _, shared in rows for v in shared.values() if _is_array(v)}
    contents = {key: array.tobytes() for key, array in arrays.items()}
    for place, (own, shared) in enumerate(rows):
        # Entries of lists need not be alike.
        shapes = ((name, None if name.endswith(_LISTED) else _shape(value)) for name, value in own.items())
        # Positions differ by the shape of an image in the prompt.
        values = ((n, _shape(v), contents.get(id(v))) for n, v in shared.items())
        found.setdefault((*shapes, *values), []).append(place)
    return found


def _shape(value: Any) -> Any:
    """Return an array's shape; of a plain value, which must be the same for all rows, its text."""
    return np.shape(value) if _is_array(value) else repr(value)


def _arguments(rows: Sequence[_Row], device: torch.device) -> dict[str, Any]:
    """Return the arguments of a call for its rows."""
    (first, shared), *_ = rows
    flat = {name: _on_device(value, device) for name, value in shared.items()}
    for name in first:
        values = [own[name] for own, _ in rows]
        if name.endswith(_LISTED):
            flat[name.removesuffix(_LISTED)] = [_on_device(value, device) for value in values]
        else:
            # What images share, such as a prompt's embeddings, is moved once.
            unique = {id(value): value for value in values}
            places = {key: place for place, key in enumerate(unique)}
            rows_of = torch.tensor([places[id(value)] for value in values], device=device)
            flat[name] = _on_device(np.stack(list(unique.values())), device)[rows_of]
    return _tree(flat)


def _tree(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, leaf = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return {name: _with_tuples(value) if name not in flat else value for name, value in tree.items()}


def _with_tuples(node: Any) -> Any:
    """Return dicts whose names are numbers as tuples."""
    if not isinstance(node, dict):
        return node
    entries = {name: _with_tuples(value) for name, value in node.items()}
    return tuple(entries.values()) if entries and all(name.isdecimal() for name in entries) else entries


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic)


def _on_device(value: Any, device: torch.device) -> Any:
    """Return an array as a tensor; floating-point numbers become float32 there."""
    if not _is_array(value):
        return value
    array = np.asarray(value)
    if array.dtype.name == "bfloat16":
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    moved = tensor.to(device)
    return moved.float() if moved.is_floating_point() else moved
