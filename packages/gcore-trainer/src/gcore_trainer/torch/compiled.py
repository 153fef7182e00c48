"""Layers of packed models compiled by torch.compile, one graph for rows of all lengths."""

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import AttentionInterface

from gcore_trainer.errors import UnsupportedModelError
from gcore_trainer.torch.fused_layers import restore_layers
from gcore_trainer.torch.packed_model import ATTENTION_NAME, PackedTransformer

_logger = logging.getLogger(__name__)


def compile_layers(packed: PackedTransformer[Any], *, backend: str | None = None) -> None:
    """Compile a model's layers, each as it is called; embeddings, attention and the head stay as they are.

    The pieces of a layer before and after its attention are graphs, with the row's length as a variable: the first
    passes with and without gradient compile them, for all layers of a kind and all later rows. Attention is not traced,
    since each row has a plan of its own. Results differ from those of the model before by rounding errors.

    A checkpointed layer is computed again by the same graphs.

    Args:
        backend: of torch.compile; None: Inductor, or on a CPU without a C++ compiler one that makes nothing faster.

    Raises:
        UnsupportedModelError: the model has experts or linear attention, whose graphs depend on the tokens; or its
            activations are offloaded, which needs hooks at every module.
    """
    layers = packed.layers()
    reason = _unsupported_feature(packed, layers)
    if reason is not None:
        raise UnsupportedModelError(
            f"compile is true, and the model ({packed.model.config.model_type}) {reason}; expected a dense model with "
            "softmax attention, and activation_offload false"
        )
    packed.fuses_layers = False
    restore_layers(packed.model)
    _leave_attention_out()
    compile_function = partial(
        torch.compile, dynamic=True, backend=backend or compile_backend(packed.model.device)
    )
    for layer in layers:
        layer.forward = _compile_forward(layer.forward, compile_function)


def _unsupported_feature(
    packed: PackedTransformer[Any], layers: Sequence[torch.nn.Module]
) -> str | None:
    """Return the feature that keeps a model from being compiled; None: there is none."""
    if packed.num_routers:
        return "has a mixture of experts"
    if any(hasattr(layer, "linear_attn") for layer in layers):
        return "has linear attention"
    for layer in layers:
        for module in layer.modules():
            # Hooks of FSDP come later, around entire layers. torch has no public way to ask for hooks.
            if module._forward_pre_hooks:  # pyright: ignore[reportPrivateUsage]
                return "offloads activations"
    return None


def _compile_forward(
    forward: Callable[..., Any], compile_function: Callable[..., Any]
) -> Callable[..., Any]:
    if not isinstance(forward, partial):
        return compile_function(forward)
    # Of a checkpointed layer, compile the function that is computed again, not the call that does so.
    return partial(
        forward.func, compile_function(forward.args[0]), *forward.args[1:], **forward.keywords
    )


def _leave_attention_out() -> None:
    attend: Any = AttentionInterface()[ATTENTION_NAME]
    if not hasattr(attend, "_torchdynamo_disable"):
        AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(attend))


def compile_backend(device: torch.device) -> str:
    """Return Inductor, which needs a C++ compiler on CPU; without one graphs are run operation by operation."""
    if device.type != "cpu" or any(
        map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))
    ):
        return "inductor"
    _logger.warning(
        "compile is true, and no C++ compiler is installed: layers are traced, and not made faster"
    )
    return "aot_eager"
