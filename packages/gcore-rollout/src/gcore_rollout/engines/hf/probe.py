"""A comparison of the `hf` engine's logits with those of transformers itself, made when a model is loaded."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from gcore_rollout.errors import RolloutError, UnsupportedModelError

_MAX_DIFFERENCE = 1e-3
"""Between log-probabilities of dense models in float32, whose rounding is far below."""
_MAX_ROUNDED_DIFFERENCE = 0.1
"""With fewer bits, or with experts, between which rounding may decide."""
_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Raised by models that are called in a way that they do not know."""


def probe_prompts(vocab_size: int, max_length: int, max_num_seqs: int) -> list[list[int]]:
    """Return one or two prompts of different lengths, which leave space for two tokens."""
    rng = np.random.default_rng(0)
    lengths = [max(1, min(length, max_length - 2)) for length in (12, 5)]
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths[:max_num_seqs]]


@torch.inference_mode()
def check_logits(
    model: Any, prompts: Sequence[Sequence[int]], engine_logits: Callable[[Sequence[int]], Sequence[torch.Tensor]]
) -> None:
    """Compare the engine's logits of a first and a second token with those of transformers, a sequence at a time.

    Args:
        model: of transformers.
        prompts: of `probe_prompts`.
        engine_logits: returns logits [P, V] after the prompts, and after one token more of each, which it is given.

    Raises:
        UnsupportedModelError: they differ by more than rounding, or the model cannot be called in this way.
    """
    model_type: str = model.config.model_type
    next_tokens = [prompt[0] for prompt in prompts]
    config = model.config.get_text_config()
    with _refusing(f"the hf engine cannot run {model_type!r}"):
        after_prompts_PV, after_tokens_PV = engine_logits(next_tokens)
        own_attention = config._attn_implementation
        config._attn_implementation = "eager"
        try:
            expected_P2V = torch.stack(
                [_alone(model, [*prompt, token]) for prompt, token in zip(prompts, next_tokens, strict=True)]
            )
        finally:
            config._attn_implementation = own_attention
    actual_P2V = torch.stack([after_prompts_PV, after_tokens_PV], dim=1)
    differences_P2 = (actual_P2V.float().log_softmax(-1) - expected_P2V).abs().mean(-1)
    limit = _MAX_ROUNDED_DIFFERENCE if _rounds(model) else _MAX_DIFFERENCE
    # A comparison with nan is false.
    if not float(differences_P2.max()) <= limit:
        raise UnsupportedModelError(
            f"log-probabilities of {model_type!r} in the hf engine differ from those of transformers by "
            f"{float(differences_P2.max()):.2g} on average (at most {limit:g} is rounding): the model does something "
            "that the engine does not compute, the vllm engine may"
        )


def _alone(model: Any, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [2, V] after the last two tokens."""
    input_ids = torch.tensor([tokens], device=model.device)
    logits_2V = model(input_ids=input_ids, use_cache=False).logits[0, -2:]
    return logits_2V.float().log_softmax(-1)


def _rounds(model: Any) -> bool:
    if model.dtype not in (torch.float32, torch.float64) or "expert" in str(model.config.to_dict().keys()):
        return True
    return model.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"


@contextmanager
def _refusing(what: str) -> Generator[None]:
    try:
        yield
    except (RolloutError, torch.OutOfMemoryError):
        raise
    except _FAULTS as error:
        raise UnsupportedModelError(f"{what} ({type(error).__name__}: {error}): the vllm engine may") from error
