"""The calls that a pipeline makes of its denoiser in a step: their arguments, and how their outputs are combined."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from gcore_rollout.engines.diffusion.arrays import host_array, host_entries, host_rows
from gcore_rollout.engines.diffusion.types import Condition
from gcore_rollout.errors import UnsupportedModelError

_TIMESTEPS = ("timestep", "timesteps", "t")
"""Names that models have for their timestep."""
_TOLERANCE = 1e-5
"""Tolerance, relative to the largest entry, when a pipeline's use of its model is checked in float32."""
_TIMESTEP_TOLERANCE = 1e-2
"""The same of timesteps, which pipelines round to the model's data type."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelCall:
    """The arguments and the output of one call of a denoiser; some models have a list of an entry for each image."""

    arguments: dict[str, Any]
    """By the denoiser's names for them."""
    latents_argument: str
    """Its name for the latents."""
    output: torch.Tensor | Sequence[torch.Tensor]
    is_of_trained: bool = True
    """The denoiser is the one that is trained, rather than another one of the pipeline."""

    @property
    def timestep(self) -> float:
        """The timestep, which all images share."""
        value = next((self.arguments[name] for name in _TIMESTEPS if self.arguments.get(name) is not None), None)
        if value is None:
            raise UnsupportedModelError(
                f"arguments of the pipeline's model are {sorted(self.arguments)}; expected a timestep among them"
            )
        if isinstance(value, torch.Tensor) and value.ndim > 1:
            raise UnsupportedModelError(f"the model's timestep has shape {tuple(value.shape)}; expected one an image")
        return float(value.reshape(-1)[0]) if isinstance(value, torch.Tensor) else float(value)

    def conditions(self, latents: torch.Tensor) -> dict[str, Any]:
        """Return what the model was given besides the scheduler's latents [B, ...] and the timestep.

        These are tensors, plain values, and lists of both. A dict that holds tensors has a name for each of its
        entries, as in ``added_cond_kwargs.time_ids``. What follows the latents along an axis is ``hidden_states+1``.

        Raises:
            UnsupportedModelError: other latents, or something else that training could not give again.
        """
        left_out = {"return_dict", self.latents_argument, *_TIMESTEPS}
        found = _flat({name: v for name, v in self.arguments.items() if v is not None and name not in left_out})
        return found | self._appended(latents)

    def outputs(self, like: torch.Tensor) -> torch.Tensor:
        """Return the outputs for all rows, of as many dimensions and the data type of the scheduler's input."""
        return _as_tensor(self.output, like.ndim).to(like.dtype)

    def _appended(self, latents: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what the model was given after the scheduler's latents [B, ...], such as those of an image."""
        given = _as_tensor(self.arguments[self.latents_argument], latents.ndim)
        if given is latents:
            return {}
        expected = torch.cat([latents] * max(1, len(given) // len(latents))).to(given.dtype)
        if given.ndim == latents.ndim:
            longer = [axis for axis in range(1, given.ndim) if given.shape[axis] > expected.shape[axis]]
            length = expected.shape[longer[0]] if longer else 0
            own = given.narrow(longer[0], 0, length) if longer else given
            if own.shape == expected.shape and torch.equal(own, expected):
                return {
                    f"{self.latents_argument}+{i}": given.narrow(i, length, given.shape[i] - length) for i in longer
                }
        raise UnsupportedModelError(
            f"the pipeline gives its model latents of shape {tuple(given.shape)} for its scheduler's "
            f"{tuple(latents.shape)}; expected the same latents, once or twice, with or without others after them"
        )


@dataclass(frozen=True, kw_only=True)
class AnswerForm:
    """The form in which the outputs with the prompt, c, and without it, u, make up the scheduler's input in a step.

    It is c, or u + guidance_scale (c - u) (classifier-free guidance, arXiv 2207.12598). The rows of c are those of the
    first or the second half of the outputs of all calls.
    """

    guidance_scale: float | None = None
    """None: the model is only called with the prompt."""
    is_prompt_first: bool = True
    keeps_norm: bool = False
    """Norms over the last dimension are scaled to those of c."""
    is_negated: bool = False
    """The scheduler is given minus this."""

    def __call__(self, outputs: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the scheduler's input for the outputs [B or 2B, ...].

        Outputs after the latents' ``shape`` [...], of other channels or of appended latents, are left out.
        """
        outputs = outputs[(slice(None), *map(slice, shape))]
        combined = with_prompt = outputs
        if self.guidance_scale is not None:
            with_prompt, without = self.halves(outputs, len(outputs) // 2)
            combined = without + self.guidance_scale * (with_prompt - without)
        if self.keeps_norm:
            norms = (torch.linalg.vector_norm(each, dim=-1, keepdim=True) for each in (with_prompt, combined))
            combined = combined * (next(norms) / next(norms))
        return -combined if self.is_negated else combined

    def halves(self, rows: Any, count: int) -> tuple[Any, Any]:
        """Return the rows with and those without the prompt, ``count`` of each."""
        first, second = rows[:count], rows[count:]
        return (first, second) if self.is_prompt_first else (second, first)

    @classmethod
    def found(cls, calls: Sequence[ModelCall], given: torch.Tensor, guidance_scale: float) -> "AnswerForm":
        """Return the form by which the scheduler was given a tensor [B, ...]; `UnsupportedModelError` if there is none.

        A call of 2B rows has the prompt in its second half, or in the first (Z-Image); of two calls the first has it.
        """
        outputs = stacked_outputs(calls, given)
        forms = [cls(is_negated=is_negated) for is_negated in (False, True)]
        if len(outputs) == 2 * len(given):
            orders = (True,) if len(calls) == 2 else (False, True)
            forms = [
                cls(guidance_scale=guidance_scale, is_prompt_first=first, keeps_norm=keeps_norm, is_negated=is_negated)
                for first, keeps_norm, is_negated in product(orders, (False, True), (False, True))
            ]
        best = min(forms, key=lambda form: form.error(outputs, given))
        if best.holds(calls, given):
            return best
        raise UnsupportedModelError(
            f"the pipeline gives its scheduler {tuple(given.shape)} for its model's outputs of shape "
            f"{tuple(outputs.shape)} in {len(calls)} calls; expected the output itself, or u + guidance_scale (c - u) "
            "of the ones without and with the prompt, which training can compute again"
        )

    def holds(self, calls: Sequence[ModelCall], given: torch.Tensor) -> bool:
        """Return whether the scheduler was given what this form makes of the calls' outputs, up to rounding."""
        # To compare values the host would wait for the device.
        if self == AnswerForm() and len(calls) == 1 and calls[0].output is given:
            return True
        return self.error(stacked_outputs(calls, given), given) <= max(_TOLERANCE, 4 * torch.finfo(given.dtype).eps)

    def error(self, outputs: torch.Tensor, given: torch.Tensor) -> float:
        """Return the largest difference, relative to the largest entry of what the scheduler was given."""
        own = self(outputs, given.shape[1:])
        if own.shape != given.shape:
            return math.inf
        return float((own - given).abs().max() / given.abs().max().clamp(min=torch.finfo(given.dtype).tiny))


def stacked_outputs(calls: Sequence[ModelCall], like: torch.Tensor) -> torch.Tensor:
    """Return the outputs of all calls of a step, those of the first call first."""
    return torch.cat([call.outputs(like) for call in calls])


def same_conditions(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two steps gave the model the same conditions."""
    return one.keys() == other.keys() and all(_is_same(value, other[name]) for name, value in one.items())


def image_conditions(conditions: Mapping[str, Any], per_image: set[str]) -> tuple[list[Any], dict[str, Condition]]:
    """Split a call's conditions into those of each of its rows, and those that rows share.

    Lists with an entry for each row, or for as many rows as a prompt has, have "[]" after their names. Other lists of
    tensors have a name for each entry. Equal conditions of neighbours, such as those of a prompt, are one array.
    """
    num_rows = max((len(value) for name, value in conditions.items() if name in per_image), default=0)
    rows: list[dict[str, Condition]] = [{} for _ in range(num_rows)]
    shared: dict[str, Condition] = {}
    for name, value in conditions.items():
        if name in per_image and isinstance(value, torch.Tensor):
            for row, entry in zip(rows, host_rows(value), strict=True):
                row[name] = entry
        elif name in per_image:
            entries = host_entries(value)
            for place, row in enumerate(rows):
                row[f"{name}[]"] = entries[place * len(entries) // num_rows]
        elif isinstance(value, list | tuple) and _holds_tensors(value):
            shared |= {f"{name}.{index}": _on_host(entry) for index, entry in enumerate(value)}
        else:
            shared[name] = _on_host(value)
    return rows, shared


def timestep_map(times: Sequence[tuple[float, float]], num_train: int) -> tuple[float, float] | None:
    """Return (scale, shift): the model is given scale x the scheduler's timestep + shift, in all steps (``times``).

    They are multiples of the scheduler's time, or of the time left, num_train - time; None: neither.
    """
    largest = max(abs(passed) for _, passed in times)
    (first, passed_first), (last, passed_last) = times[0], times[-1]
    ratio, inverse = passed_first / first, passed_last / (num_train - last)
    for scale, shift in ((ratio, 0.0), (-inverse, inverse * num_train)):
        errors = (abs(scale * time + shift - passed) for time, passed in times)
        if scale and max(errors) <= _TIMESTEP_TOLERANCE * largest:
            return scale, shift
    return None


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and _holds_tensors(value):
            found |= _flat(value, f"{prefix}{name}.")
            continue
        entries = value if isinstance(value, list | tuple) and _holds_tensors(value) else [value]
        for entry in entries:
            if not isinstance(entry, torch.Tensor) and not _is_plain(entry):
                raise UnsupportedModelError(
                    f"the pipeline gives its model {prefix}{name} of type {type(entry).__name__}; expected tensors, "
                    "plain values, and dicts and lists of them"
                )
        found[prefix + name] = value
    return found


def _holds_tensors(value: Any) -> bool:
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, torch.Tensor) or any(_holds_tensors(entry) for entry in entries)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(entry) for key, entry in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(entry) for entry in value)
    return value is None or isinstance(value, bool | int | float | str)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        are_tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
        return are_tensors and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one == other


def _on_host(value: Any) -> Any:
    return host_array(value) if isinstance(value, torch.Tensor) else value


def _as_tensor(rows: torch.Tensor | Sequence[torch.Tensor], ndim: int) -> torch.Tensor:
    """Return rows as one tensor; those of a list have an axis of one frame after their channels (Z-Image)."""
    if isinstance(rows, torch.Tensor):
        return rows
    stacked = torch.stack(list(rows))
    return stacked.squeeze(2) if stacked.ndim == ndim + 1 else stacked
