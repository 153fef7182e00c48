"""Loading of transformers models, and the checks that a packed row is scored as transformers scores each sequence.

transformers' models differ in more than their configuration says: masks, positions, heads and state that a packed row
would get wrong without an error. So a loaded model scores a packed row of a few sequences, and each on its own.
"""

import re
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from gcore_trainer.errors import StateError, TrainerError, UnsupportedModelError
from gcore_trainer.objectives.objective import named_scores
from gcore_trainer.packing.vision import VISION_MODELS
from gcore_trainer.sample import Sample
from gcore_trainer.torch.host_memory import local

_LENGTHS = ((5, 4), (5, 7), (1, 3), (5, 2), (30, 12))
"""Lengths of prompts and responses; all prompts of 5 tokens are the same."""
_MAX_DIFFERENCE = 1e-3
"""Largest difference in float32, whose rounding is far below."""
_MAX_ROUNDED_DIFFERENCE = 0.05
"""The same with fewer bits; or four times the difference of transformers' eager and SDPA attention, if larger."""
_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Raised by models that are called in a way that they do not know."""
_LAYER_NUMBER = re.compile(r"\.\d+\.")
_SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}
_LINEAR_ATTENTION_MODELS = {"olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}
"""Model types whose layers of type ``linear_attention`` are supported; such a layer has a ``linear_attn``."""
_DIVIDED = frozenset(
    {
        "granite",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
        "minicpm3",
    }
)
"""Model types that divide their logits, or the hidden states before the head, by ``logits_scaling``."""
_LOGIT_SETTINGS = {
    "final_logit_softcapping": (
        None,
        {
            "gemma2",
            "gemma3_text",
            "gemma3n_text",
            "gemma4_text",
            "gemma4_unified_text",
            "nanochat",
            "vaultgemma",
        },
    ),
    "logits_scaling": (1.0, _DIVIDED | {"hyperclovax"}),
    "logit_scale": (1.0, {"cohere", "cohere2", "cohere2_moe"}),
}
"""Settings that change logits: the value that does not, and the model types of which it is known how."""


def load_model(model_class: Any, path: str | Path, *, attention: str, **options: Any) -> Any:
    """Load a Hugging Face folder with the auto class of transformers that a packed model class names.

    Raises:
        UnsupportedModelError: the class has no such model, or one that has only attention of its own.
        StateError: the folder lacks some of the model's tensors, has some of other shapes, has layers that its
            configuration does not have, or does not load.
    """
    auto_class, implementations, config = choose_class(model_class, path, attention)
    options |= {
        **model_class.load_options,
        "attn_implementation": implementations,
        "output_loading_info": True,
    }
    try:
        # Tensors of other shapes are reported below, by name.
        model, loaded = auto_class.from_pretrained(path, ignore_mismatched_sizes=True, **options)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, KeyError, TypeError) as error:
        # Of models that have classes of their own for every attention that they know.
        raise UnsupportedModelError(
            f"{config.model_type!r} does not load with an attention that is not transformers' own "
            f"({type(error).__name__}: {error})"
        ) from error
    except (ArithmeticError, ImportError, RuntimeError, ValueError) as error:
        raise StateError(
            f"the model in {path} does not load ({type(error).__name__}: {error})"
        ) from error
    for name, in_file, expected in sorted(loaded["mismatched_keys"]):
        raise StateError(
            f"the weights in {path} do not fit its config.json: {name} has shape {list(in_file)}; expected "
            f"{list(expected)}"
        )
    check_layers(path, model, loaded["unexpected_keys"])
    # transformers draws at random what the files lack.
    missing = sorted(n for n in loaded["missing_keys"] if not n.startswith(model_class.new_weights))
    if missing:
        raise StateError(
            f"the weights in {path} lack {len(missing)} of the model's tensors, such as {missing[0]}"
        )
    return model


def check_layers(path: str | Path, model: Any, unexpected: Iterable[str]) -> None:
    """Raise `StateError` if unexpected tensors belong to layers beyond the model's configuration."""
    layer_tensors = {_LAYER_NUMBER.sub(".N.", name) for name in model.state_dict()}
    further = sorted(name for name in unexpected if _LAYER_NUMBER.sub(".N.", name) in layer_tensors)
    if further:
        raise StateError(
            f"the weights in {path} have {len(further)} tensors of layers that config.json does not have, such as "
            f"{further[0]}; expected the configuration that the weights were saved with (num_hidden_layers)"
        )


def choose_class(model_class: Any, path: str | Path, attention: str) -> tuple[Any, Any, Any]:
    """Return the auto class of a folder's model, its ``attn_implementation`` and its configuration.

    Raises:
        UnsupportedModelError: the class has no such model.
    """
    auto_class = model_class.auto_class
    implementations = attention
    config = AutoConfig.from_pretrained(path, **model_class.load_options)
    is_known = auto_class is not None and type(config) in auto_class._model_mapping
    if config.model_type in VISION_MODELS and (model_class.vision_class or not is_known):
        auto_class = model_class.vision_class
        implementations = {"text_config": attention, "vision_config": "sdpa"}
    if auto_class is None:
        raise UnsupportedModelError(
            f"{path} is a {config.model_type!r} model; expected one without images for {model_class.__name__}"
        )
    if type(config) not in auto_class._model_mapping:
        raise UnsupportedModelError(
            f"model_type is {config.model_type!r}; expected one that {auto_class.__name__} has, or one whose images "
            f"are understood: {', '.join(VISION_MODELS)}"
        )
    return auto_class, implementations, config


def check_layer_types(text_config: Any, model_type: str) -> bool:
    """Return whether a model has linear attention; raise `UnsupportedModelError` for an unsupported layer type."""
    layer_types: set[str] = set(getattr(text_config, "layer_types", None) or ())
    supported = set(_SUPPORTED_LAYER_TYPES)
    if text_config.model_type in _LINEAR_ATTENTION_MODELS:
        supported.add("linear_attention")
    unsupported = sorted(layer_types - supported)
    if unsupported:
        raise UnsupportedModelError(
            f"{model_type!r} has layers of type {', '.join(unsupported)}: packed training computes "
            f"{' and '.join(sorted(_SUPPORTED_LAYER_TYPES))} only"
        )
    return "linear_attention" in layer_types


def logit_changes(config: Any) -> tuple[float, float | None]:
    """Return the factor and the soft cap of the logits (see `token_scores`); `UnsupportedModelError` if unknown."""
    model_type = config.model_type
    values = [getattr(config, name, None) for name in _LOGIT_SETTINGS]
    for value, (name, (neutral, model_types)) in zip(values, _LOGIT_SETTINGS.items(), strict=True):
        if value not in (None, neutral) and model_type not in model_types:
            raise UnsupportedModelError(
                f"{name} is {value}; expected {neutral} for model type {model_type!r}: packed training computes it "
                f"for {', '.join(sorted(model_types))}"
            )
    softcap, scaling, logit_scale = values
    scale = 1.0
    if scaling is not None:
        scale = 1 / scaling if model_type in _DIVIDED else scaling
    if logit_scale is not None:
        scale *= logit_scale
    return scale, softcap


def freeze_rope(model: torch.nn.Module, max_length: int | None) -> bool:
    """Make rotary embeddings choose their frequencies as for a sequence of ``max_length`` tokens.

    transformers chooses the factors of ``longrope`` (LongRoPE, arXiv 2402.13753) and the base of ``dynamic`` by the
    largest position of its input, so a sequence's log-probabilities would depend on its neighbours in a packed row.
    Here the choice is made once, for the longest sequence of the run. vLLM chooses likewise, by ``max_model_len``.
    Returns whether the model has such embeddings: then it must not see longer sequences.
    """
    embeddings: dict[Any, str] = {}
    for module in model.modules():
        value: Any = getattr(module, "rope_type", None)
        rope_types = value.values() if isinstance(value, dict) else [value]
        for rope_type in rope_types:
            if isinstance(rope_type, str) and (rope_type == "longrope" or "dynamic" in rope_type):
                embeddings.setdefault(module, rope_type)
    for module, rope_type in embeddings.items():
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
        module.forward = _append_last_position(module.forward, max_length - 1)
    return bool(embeddings)


def _append_last_position(forward: Any, last: int) -> Any:
    """Return the forward pass of a rotary embedding, with one more position: the last of the longest sequence."""

    def run_forward(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        position = position_ids.new_full((*position_ids.shape[:-1], 1), last)
        angles = forward(x, torch.cat([position_ids, position], dim=-1), *args, **kwargs)
        if isinstance(angles, torch.Tensor):
            return angles[..., :-1, :]
        return tuple(part[..., :-1, :] for part in angles)

    return run_forward


def input_and_target_ids(sample: Sample, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sample's input tokens [1, P + R - 1] and targets [R]."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).to(device)
    return ids[None, :-1], ids[sample.prompt_ids.size :]


def probe_samples(model: Any, max_length: int | None) -> list[Sample]:
    """Return samples of random tokens: several prompts, one of them shared."""
    config = model.config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None), max_length]
    longest = min(filter(None, limits), default=max(map(sum, _LENGTHS)))
    settings = {**vars(model.config), **vars(config)}
    special = {
        value
        for name, value in settings.items()
        if name.endswith("token_id") and isinstance(value, int)
    }
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


def check_scores(packed: Any, max_length: int | None) -> None:
    """Raise `UnsupportedModelError` if scores of a packed row differ from transformers' by more than rounding.

    Random state, parameters, modes and configuration of the model are afterwards what they were.
    """
    samples = probe_samples(packed.model, max_length)
    routing: list[torch.Tensor] = []
    try:
        _compare(packed, samples, routing)
    except UnsupportedModelError:
        if not packed.num_routers:
            raise
        # Rounding decides between experts of nearly equal scores: now both passes take the same.
        recorded: list[Any] = []
        with torch.no_grad():
            packed.score(samples, routing=recorded)
        device = packed.model.device
        routing = [torch.from_numpy(experts.astype(np.int64)).to(device) for experts in recorded[0]]
        _compare(packed, samples, routing)
    finally:
        packed.impose(None)


def _compare(packed: Any, samples: list[Sample], routing: Sequence[torch.Tensor]) -> None:
    model = packed.model
    model_type: str = model.config.model_type

    def score_alone() -> list[torch.Tensor]:
        scores: list[torch.Tensor] = []
        for i, sample in enumerate(samples):
            packed.impose(routing[i] if routing else None)
            scores.append(packed.root(packed.alone, sample))
        return scores

    with _restore_state(model):
        with _refuse_faults(f"{model_type!r} cannot be scored packed"):
            scores = named_scores(packed.score(samples)).split(
                [s.response_ids.size for s in samples]
            )
        # Not `model.set_attn_implementation`, which would also change a vision tower's.
        config = model.config.get_text_config()
        with _refuse_faults(f"{model_type!r} cannot be compared with transformers"):
            config._attn_implementation = "eager"
            expected = score_alone()
            tolerance = _MAX_DIFFERENCE
            if _rounds(packed):
                config._attn_implementation = "sdpa" if model._supports_sdpa else "eager"
                differences = _largest_differences(score_alone(), expected)
                tolerance = max(_MAX_ROUNDED_DIFFERENCE, 4 * max(differences))
    differences = _largest_differences(scores, expected)
    worst = int(np.argmax(differences))
    # A comparison with nan is false.
    if not differences[worst] <= tolerance:
        for name, parameter in model.named_parameters():
            if not local(parameter).isfinite().all():
                raise StateError(
                    f"{name} of {model_type!r} holds nan or infinity; expected finite weights"
                )
        token = int((scores[worst] - expected[worst]).abs().argmax())
        sample = samples[worst]
        raise UnsupportedModelError(
            f"scores of {model_type!r} in a packed row differ from those of transformers by {differences[worst]:.2g} "
            f"(at most {tolerance:.2g} is rounding), most at token {token} of a response of {sample.response_ids.size} "
            f"to a prompt of {sample.prompt_ids.size}: the model does something that packed training does not compute"
        )


def _largest_differences(
    scores: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> list[float]:
    """Return the largest difference of each sample; infinity where one is NaN."""
    largest: list[float] = []
    for a, b in zip(scores, expected, strict=True):
        difference = (a.float() - b.float()).abs()
        largest.append(float(torch.where(difference.isnan(), torch.inf, difference).max()))
    return largest


def _rounds(packed: Any) -> bool:
    is_rounded = (
        packed.model.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    )
    return is_rounded or packed.compute_dtype not in (torch.float32, torch.float64)


@contextmanager
def _restore_state(model: Any) -> Generator[None]:
    """Evaluate without gradients; restore modes, attention and random state afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    config = model.config.get_text_config()
    attention: str = config._attn_implementation
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
            yield
    finally:
        config._attn_implementation = attention
        for module in training:
            module.training = True


@contextmanager
def _refuse_faults(what: str) -> Generator[None]:
    try:
        yield
    except (TrainerError, torch.OutOfMemoryError):
        raise
    except _FAULTS as error:
        raise UnsupportedModelError(f"{what} ({type(error).__name__}: {error})") from error


def fuse_on_cuda(packed: Any) -> None:
    """Fuse the layers of a packed model whose weights are loaded, if it is on CUDA and Triton is installed."""
    device = packed.model.device
    if packed.fuses_layers and device.type == "cuda" and find_spec("triton") is not None:
        from gcore_trainer.torch.fused_layers import fuse_layers

        fuse_layers(packed.model, device)
