"""Layers of packed models compiled by torch.compile, one graph for rows of all lengths."""

import logging
import os
import shutil
from collections.abc import Callable
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
    kind = packed.model.config.model_type
    layers = packed.layers()
    unfit = {
        "has a mixture of experts": packed.num_routers > 0,
        "has linear attention": any(hasattr(layer, "linear_attn") for layer in layers),
        # Hooks of FSDP come later, and lie around whole layers.
        "offloads activations": any(_is_hooked(part) for layer in layers for part in layer.modules()),
    }
    if found := [what for what, is_unfit in unfit.items() if is_unfit]:
        raise UnsupportedModelError(
            f"compile is true, and the model ({kind}) {found[0]}; expected a dense model with softmax attention, and "
            "activation_offload false"
        )
    packed.fuses_layers = False
    restore_layers(packed.model)
    _leave_attention_out()
    compiled = partial(torch.compile, dynamic=True, backend=backend or compile_backend(packed.model.device))
    for layer in layers:
        layer.forward = _compiled(layer.forward, compiled)


def _is_hooked(module: torch.nn.Module) -> bool:
    return bool(module._forward_pre_hooks)  # pyright: ignore[reportPrivateUsage]  # torch has no other way to ask


def _compiled(forward: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(forward, partial):
        return compiled(forward)
    # Of a checkpointed layer what is computed again, and not the call that does so.
    return partial(forward.func, compiled(forward.args[0]), *forward.args[1:], **forward.keywords)


def _leave_attention_out() -> None:
    attend: Any = AttentionInterface()[ATTENTION_NAME]
    if not hasattr(attend, "_torchdynamo_disable"):
        AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(attend))


def compile_backend(device: torch.device) -> str:
    """Return Inductor, which needs a C++ compiler on CPU; without one graphs are run operation by operation."""
    if device.type != "cpu" or any(map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))):
        return "inductor"
    _logger.warning("compile is true, and no C++ compiler is installed: layers are traced, and not made faster")
    return "aot_eager"
