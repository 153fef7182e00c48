"""The calls that a pipeline makes of its denoiser in a step: their arguments, and how their outputs are combined."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from gcore_rollout.engines.diffusion.arrays import host_array, host_entries, host_rows
from gcore_rollout.engines.diffusion.types import Condition
from gcore_rollout.errors import EngineModelError

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
        for name in _TIMESTEPS:
            value = self.arguments.get(name)
            if value is None:
                continue
            if not isinstance(value, torch.Tensor):
                return float(value)
            if value.ndim > 1:
                shape = tuple(value.shape)
                raise EngineModelError(
                    f"the model's timestep has shape {shape}; expected one an image"
                )
            return float(value.reshape(-1)[0])
        raise EngineModelError(
            f"arguments of the pipeline's model are {sorted(self.arguments)}; expected a timestep among them"
        )

    def conditions(self, latents: torch.Tensor) -> dict[str, Any]:
        """Return what the model was given besides the scheduler's latents [B, ...] and the timestep.

        These are tensors, plain values, and lists of both. A dict that holds tensors has a name for each of its
        entries, as in ``added_cond_kwargs.time_ids``. What follows the latents along an axis is ``hidden_states+1``.

        Raises:
            EngineModelError: other latents, or something else that training could not give again.
        """
        left_out = {"return_dict", self.latents_argument, *_TIMESTEPS}
        arguments = {
            name: v for name, v in self.arguments.items() if v is not None and name not in left_out
        }
        return _flatten_dicts(arguments) | self._find_appended(latents)

    def outputs(self, like: torch.Tensor) -> torch.Tensor:
        """Return the outputs for all rows, of as many dimensions and the data type of the scheduler's input."""
        return _stack_rows(self.output, like.ndim).to(like.dtype)

    def _find_appended(self, latents: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what the model was given after the scheduler's latents [B, ...], such as those of an image."""
        inputs = _stack_rows(self.arguments[self.latents_argument], latents.ndim)
        if inputs is latents:
            return {}
        num_copies = max(1, len(inputs) // len(latents))
        expected = torch.cat([latents] * num_copies).to(inputs.dtype)
        if inputs.ndim == latents.ndim:
            appended: dict[str, torch.Tensor] = {}
            start = inputs
            for axis in range(1, inputs.ndim):
                length = expected.shape[axis]
                num_more = inputs.shape[axis] - length
                if num_more > 0:
                    appended[f"{self.latents_argument}+{axis}"] = inputs.narrow(
                        axis, length, num_more
                    )
                    start = inputs.narrow(axis, 0, length)
            # With more along two axes, the shapes differ.
            if start.shape == expected.shape and torch.equal(start, expected):
                return appended
        raise EngineModelError(
            f"the pipeline gives its model latents of shape {tuple(inputs.shape)} for its scheduler's "
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
            norm_with_prompt = torch.linalg.vector_norm(with_prompt, dim=-1, keepdim=True)
            combined = combined * (
                norm_with_prompt / torch.linalg.vector_norm(combined, dim=-1, keepdim=True)
            )
        if self.is_negated:
            return -combined
        return combined

    def halves(self, rows: Any, count: int) -> tuple[Any, Any]:
        """Return the rows with and those without the prompt, ``count`` of each."""
        if self.is_prompt_first:
            return rows[:count], rows[count:]
        return rows[count:], rows[:count]

    @classmethod
    def find(
        cls, calls: Sequence[ModelCall], scheduler_input: torch.Tensor, guidance_scale: float
    ) -> "AnswerForm":
        """Return the form by which the scheduler was given a tensor [B, ...]; `EngineModelError` if there is none.

        A call of 2B rows has the prompt in its second half, or in the first (Z-Image); of two calls the first has it.
        """
        outputs = stacked_outputs(calls, scheduler_input)
        forms = [cls(is_negated=is_negated) for is_negated in (False, True)]
        if len(outputs) == 2 * len(scheduler_input):
            orders = (True,) if len(calls) == 2 else (False, True)
            forms = [
                cls(
                    guidance_scale=guidance_scale,
                    is_prompt_first=first,
                    keeps_norm=keeps_norm,
                    is_negated=is_negated,
                )
                for first, keeps_norm, is_negated in product(orders, (False, True), (False, True))
            ]
        best = min(forms, key=lambda form: form.error(outputs, scheduler_input))
        if best.holds(calls, scheduler_input):
            return best
        raise EngineModelError(
            f"the pipeline gives its scheduler {tuple(scheduler_input.shape)} for its model's outputs of shape "
            f"{tuple(outputs.shape)} in {len(calls)} calls; expected the output itself, or u + guidance_scale (c - u) "
            "of the ones without and with the prompt, which training can compute again"
        )

    def holds(self, calls: Sequence[ModelCall], scheduler_input: torch.Tensor) -> bool:
        """Return whether the scheduler was given what this form makes of the calls' outputs, up to rounding."""
        # To compare values the host would wait for the device.
        if self == AnswerForm() and len(calls) == 1 and calls[0].output is scheduler_input:
            return True
        error = self.error(stacked_outputs(calls, scheduler_input), scheduler_input)
        return error <= max(_TOLERANCE, 4 * torch.finfo(scheduler_input.dtype).eps)

    def error(self, outputs: torch.Tensor, scheduler_input: torch.Tensor) -> float:
        """Return the largest difference, relative to the largest entry of what the scheduler was given."""
        answer = self(outputs, scheduler_input.shape[1:])
        if answer.shape != scheduler_input.shape:
            return math.inf
        largest = scheduler_input.abs().max().clamp(min=torch.finfo(scheduler_input.dtype).tiny)
        return float((answer - scheduler_input).abs().max() / largest)


def stacked_outputs(calls: Sequence[ModelCall], like: torch.Tensor) -> torch.Tensor:
    """Return the outputs of all calls of a step, those of the first call first."""
    return torch.cat([call.outputs(like) for call in calls])


def same_conditions(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two steps gave the model the same conditions."""
    return first.keys() == second.keys() and all(
        _is_same(value, second[name]) for name, value in first.items()
    )


def image_conditions(
    conditions: Mapping[str, Any], per_image: set[str]
) -> tuple[list[Any], dict[str, Condition]]:
    """Split a call's conditions into those of each of its rows, and those that rows share.

    Lists with an entry for each row, or for as many rows as a prompt has, have "[]" after their names. Other lists of
    tensors have a name for each entry. Equal conditions of neighbours, such as those of a prompt, are one array.
    """
    num_rows = max(
        (len(value) for name, value in conditions.items() if name in per_image), default=0
    )
    rows: list[dict[str, Condition]] = [{} for _ in range(num_rows)]
    shared: dict[str, Condition] = {}
    for name, value in conditions.items():
        if name in per_image and isinstance(value, torch.Tensor):
            for row, entry in zip(rows, host_rows(value), strict=True):
                row[name] = entry
        elif name in per_image:
            entries = host_entries(value)
            for number, row in enumerate(rows):
                row[f"{name}[]"] = entries[number * len(entries) // num_rows]
        elif isinstance(value, list | tuple) and _holds_tensors(value):
            shared |= {f"{name}.{index}": _copy_to_host(entry) for index, entry in enumerate(value)}
        else:
            shared[name] = _copy_to_host(value)
    return rows, shared


def timestep_map(
    times: Sequence[tuple[float, float]], num_train: int
) -> tuple[float, float] | None:
    """Return (scale, shift): the model is given scale x the scheduler's timestep + shift, in all steps (``times``).

    They are multiples of the scheduler's time, or of the time left, num_train - time; None: neither.
    """
    largest = max(abs(passed) for _, passed in times)
    (first, passed_first), (last, passed_last) = times[0], times[-1]
    ratio = passed_first / first
    inverse = passed_last / (num_train - last)
    for scale, shift in ((ratio, 0.0), (-inverse, inverse * num_train)):
        errors = (abs(scale * time + shift - passed) for time, passed in times)
        if scale and max(errors) <= _TIMESTEP_TOLERANCE * largest:
            return scale, shift
    return None


def _flatten_dicts(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and _holds_tensors(value):
            flat |= _flatten_dicts(value, f"{prefix}{name}.")
            continue
        entries: Sequence[Any] = [value]
        if isinstance(value, list | tuple) and _holds_tensors(value):
            entries = value
        for entry in entries:
            if not isinstance(entry, torch.Tensor) and not _is_plain(entry):
                raise EngineModelError(
                    f"the pipeline gives its model {prefix}{name} of type {type(entry).__name__}; expected tensors, "
                    "plain values, and dicts and lists of them"
                )
        flat[prefix + name] = value
    return flat


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    return isinstance(value, torch.Tensor)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(entry) for key, entry in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _is_same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        are_tensors = isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
        return are_tensors and first.shape == second.shape and torch.equal(first, second)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_is_same, first, second))
    return first == second


def _copy_to_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return host_array(value)
    return value


def _stack_rows(rows: torch.Tensor | Sequence[torch.Tensor], ndim: int) -> torch.Tensor:
    """Return rows as one tensor; those of a list have an axis of one frame after their channels (Z-Image)."""
    if isinstance(rows, torch.Tensor):
        return rows
    stacked = torch.stack(list(rows))
    if stacked.ndim == ndim + 1:
        return stacked.squeeze(2)
    return stacked
