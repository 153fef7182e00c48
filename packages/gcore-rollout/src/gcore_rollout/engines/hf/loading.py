"""Loading of a model for the `hf` engine, and the comparison of its logits there with those of transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from gcore_rollout.engines.hf.decoding import ATTENTION_NAME, register
from gcore_rollout.errors import RolloutError, UnsupportedModelError
from gcore_rollout.images.vision_processor import VISION_MODELS, VisionProcessor

_MAX_DIFFERENCE = 1e-3
"""Largest difference of log-probabilities of dense models in float32, whose rounding is far below."""
_MAX_ROUNDED_DIFFERENCE = 0.1
"""Largest difference with fewer bits, or with experts, between which rounding may decide."""
_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions of models that are called in a way that they do not know."""


def load_model(
    path: str | Path, *, dtype: torch.dtype, max_model_len: int | None
) -> tuple[Any, VisionProcessor | None]:
    """Load a local Hugging Face folder with the engine's attention, and its image processor if it reads images.

    Raises:
        UnsupportedModelError: see `HFEngine.from_pretrained`.
    """
    register()
    config = AutoConfig.from_pretrained(path)
    text_config: Any = config.get_text_config()
    vision = VisionProcessor.from_pretrained(path) if config.model_type in VISION_MODELS else None
    attention: Any = ATTENTION_NAME
    if vision is not None:
        attention = {"text_config": attention, "vision_config": "sdpa"}
    auto_class: Any = AutoModelForCausalLM if vision is None else AutoModelForImageTextToText
    try:
        model: Any = auto_class.from_pretrained(path, config=config, dtype=dtype, attn_implementation=attention)
    except (AttributeError, KeyError, TypeError) as error:
        # Raised by models that have classes of their own for every attention that they know.
        raise UnsupportedModelError(
            f"{config.model_type!r} does not load with an attention that is not transformers' own "
            f"({type(error).__name__}: {error}): the vllm engine may run it"
        ) from error
    # transformers itself ignores an attention that the model never calls, and the samples would mix.
    others = set(getattr(text_config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if not model.is_backend_compatible() or others:
        raise UnsupportedModelError(
            f"{config.model_type!r} does not run all its layers through transformers' attention interface: "
            "the hf engine cannot run it, the vllm engine may"
        )
    longest = longest_sequence(text_config)
    if max_model_len is not None and longest < min(max_model_len, text_config.max_position_embeddings):
        raise UnsupportedModelError(
            f"max_model_len is {max_model_len}; expected at most {longest} for rope_type 'longrope' of "
            f"{config.model_type!r}, whose factors change there: the vllm engine computes longer sequences"
        )
    return model, vision


def longest_sequence(config: Any) -> int:
    """Return the tokens of the longest sequence that a model of this config computes alike in every batch.

    transformers chooses the factors of rope_type ``longrope`` (LongRoPE, arXiv 2402.13753) by the largest position of a
    batch, and the base of ``dynamic`` beyond ``max_position_embeddings``.
    """
    longest: int = config.max_position_embeddings
    rope: Any = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") == "longrope":
            longest = min(longest, parameters["original_max_position_embeddings"])
    return longest


@torch.inference_mode()
def check_logits(
    model: Any,
    engine_logits: Callable[[Sequence[Sequence[int]], Sequence[int]], Sequence[torch.Tensor]],
    *,
    max_length: int,
    max_num_seqs: int,
) -> None:
    """Compare the engine's logits of a first and a second token with those of transformers, a sequence at a time.

    Args:
        engine_logits: returns logits [P, V] after prompts, and after one token more of each; both are given.

    Raises:
        UnsupportedModelError: they differ by more than rounding, or the model cannot be called in this way.
    """
    model_type: str = model.config.model_type
    rng = np.random.default_rng(0)
    # One or two prompts of different lengths, which leave space for two tokens.
    lengths = [max(1, min(length, max_length - 2)) for length in (12, 5)]
    vocab_size: int = model.get_input_embeddings().num_embeddings
    prompts = [rng.integers(0, vocab_size, length).tolist() for length in lengths[:max_num_seqs]]
    next_tokens = [prompt[0] for prompt in prompts]
    config = model.config.get_text_config()
    own_attention = config._attn_implementation
    try:
        after_prompts_PV, after_tokens_PV = engine_logits(prompts, next_tokens)
        config._attn_implementation = "eager"
        expected: list[torch.Tensor] = []
        for prompt, token in zip(prompts, next_tokens, strict=True):
            input_ids = torch.tensor([[*prompt, token]], device=model.device)
            logits_2V = model(input_ids=input_ids, use_cache=False).logits[0, -2:]
            expected.append(logits_2V.float().log_softmax(-1))
    except (RolloutError, torch.OutOfMemoryError):
        raise
    except _FAULTS as error:
        raise UnsupportedModelError(
            f"the hf engine cannot run {model_type!r} ({type(error).__name__}: {error}): the vllm engine may"
        ) from error
    finally:
        config._attn_implementation = own_attention
    actual_P2V = torch.stack([after_prompts_PV, after_tokens_PV], dim=1)
    differences_P2 = (actual_P2V.float().log_softmax(-1) - torch.stack(expected)).abs().mean(-1)
    rounds = model.dtype not in (torch.float32, torch.float64) or "expert" in str(model.config.to_dict().keys())
    if model.device.type == "cuda":
        rounds |= torch.get_float32_matmul_precision() != "highest"
    limit = _MAX_ROUNDED_DIFFERENCE if rounds else _MAX_DIFFERENCE
    # A comparison with nan is false.
    if not float(differences_P2.max()) <= limit:
        raise UnsupportedModelError(
            f"log-probabilities of {model_type!r} in the hf engine differ from those of transformers by "
            f"{float(differences_P2.max()):.2g} on average (at most {limit:g} is rounding): the model does something "
            "that the engine does not compute, the vllm engine may"
        )
