"""A comparison of packed scores with those of transformers itself, made when a model is loaded.

transformers' models differ in more than their configuration says: masks, positions, heads and state that a packed row
would get wrong without an error. One packed row of a few sequences, and each of these sequences on its own by
transformers' attention, show whether a model is scored as transformers does.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from gcore_trainer.errors import TrainerError, UnsupportedModelError
from gcore_trainer.sample import Sample

_LENGTHS = ((5, 4), (5, 7), (1, 3), (5, 2), (30, 12))
"""Lengths of prompts and responses; all prompts of 5 tokens are the same."""
_MAX_DIFFERENCE = 1e-3
"""Largest difference in float32, whose rounding is far below."""
_MAX_ROUNDED_DIFFERENCE = 0.05
"""The same with fewer bits; four times the difference of transformers' own eager and SDPA attention, if larger."""
_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Raised by models that are called in a way that they do not know."""


def probe_samples(model: Any, max_length: int | None) -> list[Sample]:
    """Return samples of random tokens: several prompts, one of them shared.

    Args:
        model: whose vocabulary and ``max_position_embeddings`` bound the samples.
        max_length: another bound on prompt and response.
    """
    config = model.config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None), max_length]
    longest = min((limit for limit in limits if limit), default=max(map(sum, _LENGTHS)))
    named = {**vars(model.config), **vars(config)}
    special = {value for name, value in named.items() if name.endswith("token_id") and isinstance(value, int)}
    vocab_size: int = model.get_input_embeddings().weight.shape[0]
    tokens = np.array([t for t in range(min(vocab_size, 1 << 16)) if t not in special] or [0])
    rng = np.random.default_rng(0)
    shared = rng.choice(tokens, 5)
    samples: list[Sample] = []
    for prompt_length, response_length in _LENGTHS:
        prompt = shared if prompt_length == shared.size else rng.choice(tokens, prompt_length)
        response = rng.choice(tokens, response_length)
        num_prompt = max(1, min(prompt_length, longest - response_length))
        num_response = max(1, min(response_length, longest - num_prompt))
        samples.append(Sample(prompt_ids=prompt[:num_prompt], response_ids=response[:num_response]))
    return samples


def check_scores(
    model: Any,
    samples: Sequence[Sample],
    packed: Callable[[], list[torch.Tensor]],
    alone: Callable[[int], torch.Tensor],
) -> None:
    """Compare packed scores with those of transformers.

    Random state, parameters, modes and configuration of the model are afterwards what they were.

    Args:
        model: of transformers, before it is wrapped or sharded.
        samples: of `probe_samples`.
        packed: returns scores [R] of every sample, from one packed row.
        alone: returns scores [R] of a sample by its place, by transformers' own forward pass.

    Raises:
        UnsupportedModelError: they differ by more than rounding, or the model cannot be called in one of these ways.
    """
    model_type: str = model.config.model_type
    with _undisturbed(model):
        with _refusing(f"{model_type!r} cannot be scored packed"):
            scores = packed()
        with _refusing(f"{model_type!r} cannot be compared with transformers"), _attention(model, "eager"):
            expected = [alone(i) for i in range(len(samples))]
            tolerance = _MAX_DIFFERENCE
            if _rounds(model):
                _set_attention(model, "sdpa" if model._supports_sdpa else "eager")
                others = [alone(i) for i in range(len(samples))]
                tolerance = max(
                    _MAX_ROUNDED_DIFFERENCE, *(4 * _largest(a, b) for a, b in zip(others, expected, strict=True))
                )
    differences = [_largest(a, b) for a, b in zip(scores, expected, strict=True)]
    worst = int(np.argmax(differences))
    # A comparison with nan is false.
    if not differences[worst] <= tolerance:
        token = int((scores[worst] - expected[worst]).abs().argmax())
        sample = samples[worst]
        raise UnsupportedModelError(
            f"scores of {model_type!r} in a packed row differ from those of transformers by {differences[worst]:.2g} "
            f"(at most {tolerance:.2g} is rounding), most at token {token} of a response of {sample.response_ids.size} "
            f"to a prompt of {sample.prompt_ids.size}: the model does something that packed training does not compute"
        )


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    difference = (a.float() - b.float()).abs()
    return float(torch.where(difference.isnan(), torch.inf, difference).max())


def _rounds(model: Any) -> bool:
    if model.dtype not in (torch.float32, torch.float64):
        return True
    return model.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"


@contextmanager
def _undisturbed(model: torch.nn.Module) -> Generator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _attention(model: Any, name: str) -> Generator[None]:
    own: str = model.config.get_text_config()._attn_implementation
    try:
        _set_attention(model, name)
        yield
    finally:
        _set_attention(model, own)


def _set_attention(model: Any, name: str) -> None:
    # Not `model.set_attn_implementation`, which would also change a vision tower's.
    model.config.get_text_config()._attn_implementation = name


@contextmanager
def _refusing(what: str) -> Generator[None]:
    try:
        yield
    except (TrainerError, torch.OutOfMemoryError):
        raise
    except _FAULTS as error:
        raise UnsupportedModelError(f"{what} ({type(error).__name__}: {error})") from error
