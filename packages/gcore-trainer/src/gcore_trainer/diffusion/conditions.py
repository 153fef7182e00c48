"""The arguments of a model for images, and the combination of its outputs for the sampler's scheduler."""

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
        """Collect the inputs of a micro-batch, whose images were made with the same settings."""
        first = samples[0]
        rows = _rows(samples)
        groups = _rows_by_shape(rows).values()
        return cls(
            calls=[(indices, _arguments([rows[i] for i in indices], device)) for indices in groups],
            guidance_scale=first.guidance_scale,
            keeps_norm=first.keeps_norm,
            is_negated=first.is_negated,
        )

    def combine(self, outputs: torch.Tensor) -> torch.Tensor:
        """Combine the outputs [B or 2B, ...] of all rows to the scheduler's input [B, ...]."""
        combined = outputs
        with_prompt = outputs
        if self.guidance_scale is not None:
            without, with_prompt = outputs.chunk(2)
            combined = without + self.guidance_scale * (with_prompt - without)
        if self.keeps_norm:
            norm = torch.linalg.vector_norm(with_prompt, dim=-1, keepdim=True)
            combined = combined * (norm / torch.linalg.vector_norm(combined, dim=-1, keepdim=True))
        if self.is_negated:
            combined = -combined
        return combined


def with_appended(
    latents: torch.Tensor, arguments: Mapping[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Append the inputs named ``NAME+AXIS`` to the latents along that axis; return them and the other arguments."""
    options: dict[str, Any] = {}
    for name, value in arguments.items():
        _, is_appended, axis = name.partition("+")
        if is_appended:
            latents = torch.cat([latents, value], int(axis))
        else:
            options[name] = value
    return latents, options


def num_calls(samples: Sequence[DiffusionSample]) -> int:
    """Return the number of calls that a model needs for images: one for each set of shapes of their conditions."""
    return len(_rows_by_shape(_rows(samples)))


_Row = tuple[Conditions, Conditions]
"""The conditions of an image's pass, and those that are shared."""


def _rows(samples: Sequence[DiffusionSample]) -> list[_Row]:
    rows: list[_Row] = []
    if samples[0].guidance_scale is not None:
        rows = [(s.negative_conditions or {}, s.shared_conditions) for s in samples]
    return rows + [(s.conditions, s.shared_conditions) for s in samples]


def _rows_by_shape(rows: Sequence[_Row]) -> dict[Any, list[int]]:
    """Return the indices of the rows that fit in one call, by their shapes and shared contents."""
    groups: dict[Any, list[int]] = {}
    # Most rows share one object, whose content is read once.
    contents: dict[int, bytes] = {}
    for index, (conditions, shared) in enumerate(rows):
        key: list[Any] = []
        for name, value in conditions.items():
            # Entries of lists need not be alike.
            key.append((name, None if name.endswith(_LISTED) else _shape(value)))
        for name, value in shared.items():
            if _is_array(value) and id(value) not in contents:
                contents[id(value)] = value.tobytes()
            # Positions differ by the shape of an image in the prompt.
            key.append((name, _shape(value), contents.get(id(value))))
        groups.setdefault(tuple(key), []).append(index)
    return groups


def _shape(value: Any) -> Any:
    """Return an array's shape; of a plain value, which must be the same for all rows, its text."""
    if _is_array(value):
        return np.shape(value)
    return repr(value)


def _arguments(rows: Sequence[_Row], device: torch.device) -> dict[str, Any]:
    """Return the arguments of a call for its rows."""
    first, shared = rows[0]
    flat = {name: _on_device(value, device) for name, value in shared.items()}
    for name in first:
        values = [conditions[name] for conditions, _ in rows]
        if name.endswith(_LISTED):
            flat[name.removesuffix(_LISTED)] = [_on_device(value, device) for value in values]
        else:
            # What images share, such as a prompt's embeddings, is moved once.
            unique = {id(value): value for value in values}
            index_of = {key: index for index, key in enumerate(unique)}
            indices = torch.tensor([index_of[id(value)] for value in values], device=device)
            flat[name] = _on_device(np.stack(list(unique.values())), device)[indices]
    return _tree(flat)


def _tree(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, leaf = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    for name in tree.keys() - flat.keys():
        tree[name] = _with_tuples(tree[name])
    return tree


def _with_tuples(node: Any) -> Any:
    """Return dicts whose names are numbers as tuples."""
    if not isinstance(node, dict):
        return node
    entries = {name: _with_tuples(value) for name, value in node.items()}
    if entries and all(name.isdecimal() for name in entries):
        return tuple(entries.values())
    return entries


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
    tensor = tensor.to(device)
    if tensor.is_floating_point():
        tensor = tensor.float()
    return tensor
