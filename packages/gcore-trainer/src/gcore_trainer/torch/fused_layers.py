"""Norms, gated MLPs and rotary embeddings of transformers' layers as one kernel each, on CUDA; and linear layers.

A layer is recognised by what it computes: on other weights and inputs its own forward pass has to give what the kernel
does. What differs, such as rotations of neighbouring pairs, stays as it is.
"""

import copy
import logging
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from gcore_trainer.packing.accumulating_linear import accumulate_gradients

_logger = logging.getLogger(__name__)
_ROTATION = "apply_rotary_pos_emb"
_SIZE = 32
"""Width of the layers that are compared."""

Forward = Callable[..., Any]


def fuse_layers(model: nn.Module, device: torch.device) -> int:
    """Replace forward passes of a model's modules by ones that call fused kernels; return how many.

    In float32 results agree to rounding errors; in half precision they are rounded less often.
    """
    fused: dict[type, Callable[[nn.Module], Forward] | None] = {}
    count = 0
    for linear in _accumulating(model):
        linear.forward = _mark(accumulate_gradients(linear))
        count += 1
    for module in list(model.modules()):
        module_class = type(module)
        if module_class not in fused:
            fused[module_class] = next(
                (make for make, agrees in _candidates(module) if _is_equal(agrees, device)), None
            )
        make = fused[module_class]
        if make is not None:
            module.forward = make(module)
            count += 1
    return count


def _accumulating(model: nn.Module) -> list[nn.Linear]:
    """Return the linear layers that are trained, without the last one of each checkpointed layer.

    With torch's own, whose input is saved before its product, checkpointing leaves that product out when it computes
    the layer again.
    """
    last: set[int] = set()
    for module in model.modules():
        is_checkpointed = isinstance(vars(module).get("forward"), partial)
        if is_checkpointed:
            last.update(map(id, _linear_layers(module)[-1:]))
    return [m for m in _linear_layers(model) if m.weight.requires_grad and id(m) not in last]


def _linear_layers(module: nn.Module) -> list[nn.Linear]:
    return [m for m in module.modules() if isinstance(m, nn.Linear) and type(m) is nn.Linear]


def restore_layers(model: nn.Module) -> None:
    """Undo `fuse_layers`."""
    for module in model.modules():
        if getattr(vars(module).get("forward"), "is_fused", False):
            del module.forward


def _candidates(
    module: nn.Module,
) -> Iterator[tuple[Callable[[nn.Module], Forward], Callable[[torch.device], bool]]]:
    """Yield the replacements of a module's forward pass, each with a check that both give the same result."""
    name = type(module).__name__
    forward = type(module).forward
    if (
        name.endswith("RMSNorm")
        and _epsilon(module) is not None
        and list(dict(module.named_parameters(recurse=False))) == ["weight"]
    ):
        for is_offset in (False, True):
            make = partial(_fused_norm, is_offset=is_offset)
            yield make, partial(_norms_agree, module, make)
    if (
        name.endswith("MLP")
        and {"gate_proj", "up_proj", "down_proj", "act_fn"} <= dict(module.named_children()).keys()
    ):
        for unit in ("swiglu", "geglu"):
            make = partial(_fused_mlp, unit=unit)
            yield make, partial(_mlps_agree, module, make)
    if (
        name.endswith("Attention")
        and isinstance(forward, FunctionType)
        and _ROTATION in forward.__code__.co_names
    ):
        yield _fused_rotation, partial(_rotations_agree, forward.__globals__[_ROTATION])


def _is_equal(agrees: Callable[[torch.device], bool], device: torch.device) -> bool:
    try:
        with torch.no_grad():
            return agrees(device)
    except Exception as error:
        _logger.debug("a layer stays as it is: %s", error)
        return False


def _bind(module: nn.Module, function: Forward) -> Forward:
    return _mark(MethodType(function, module))


def _mark(method: Any) -> Forward:
    vars(method.__func__)["is_fused"] = True
    return method


def _random(*shape: int, device: torch.device) -> torch.Tensor:
    """Return numbers that do not come from, nor change, any generator of random numbers."""
    count = torch.Size(shape).numel()
    return torch.linspace(1, 7 * count, count, device=device).sin_().view(shape)


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def _copy_with(module: nn.Module, attribute: str, parts: dict[str, Any]) -> nn.Module:
    """Return a copy of a module with other parameters or submodules, and the forward pass of its class."""
    twin = copy.copy(module)
    vars(twin)[attribute] = parts
    vars(twin).pop("forward", None)
    return twin


def _epsilon(module: nn.Module) -> float | None:
    attributes = vars(module)
    return attributes.get("variance_epsilon", attributes.get("eps"))


def _fused_norm(module: nn.Module, *, is_offset: bool) -> Forward:
    """Return the norm by torch's own kernel; with an offset the factor is 1 + weight, in float32, as in Gemma."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        shape = self.weight.shape
        if not is_offset:
            return nn.functional.rms_norm(x, shape, self.weight, _epsilon(self))
        return nn.functional.rms_norm(
            x.float(), shape, 1.0 + self.weight.float(), _epsilon(self)
        ).to(x)

    return _bind(module, forward)


def _norms_agree(
    module: nn.Module, make: Callable[[nn.Module], Forward], device: torch.device
) -> bool:
    probe = _copy_with(
        module, "_parameters", {"weight": nn.Parameter(_random(_SIZE, device=device))}
    )
    x = 3 * _random(5, _SIZE, device=device)
    return _close(probe(x), make(probe)(x))


def _fused_mlp(module: nn.Module, *, unit: str) -> Forward:
    from gcore_trainer.packing import layer_kernels

    gated = getattr(layer_kernels, unit)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))

    return _bind(module, forward)


def _mlps_agree(
    module: nn.Module, make: Callable[[nn.Module], Forward], device: torch.device
) -> bool:
    sizes = {"gate_proj": (_SIZE, 3), "up_proj": (_SIZE, 3), "down_proj": (3, _SIZE)}
    parts: dict[str, Any] = {"act_fn": module.get_submodule("act_fn")}
    for shift, (name, (rows, width)) in enumerate(sizes.items()):
        parts[name] = nn.Linear(width, rows, bias=False, device=device)
        parts[name].weight.copy_(_random(rows + shift, width, device=device)[shift:])
    probe = _copy_with(module, "_modules", parts)
    x = 3 * _random(5, 3, device=device)
    return _close(probe(x), make(probe)(x))


def _fused_rotation(module: nn.Module) -> Forward:
    from gcore_trainer.packing.layer_kernels import rotate

    method = type(module).forward
    assert isinstance(method, FunctionType)
    original = method.__globals__[_ROTATION]

    def rotate_fused(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        is_full_head = (
            cos.dim() == 3 and cos.shape[0] == 1 and q.dim() == 4 and q.shape[-1] == cos.shape[-1]
        )
        if args or kwargs or not is_full_head or cos.dtype != q.dtype:
            return original(q, k, cos, sin, *args, **kwargs)
        return rotate(q, k, cos, sin)

    # The same code, but for one name, in this model alone.
    names = {**method.__globals__, _ROTATION: rotate_fused}
    forward = FunctionType(
        method.__code__, names, method.__name__, method.__defaults__, method.__closure__
    )
    forward.__kwdefaults__ = method.__kwdefaults__
    return _bind(module, forward)


def _rotations_agree(original: Forward, device: torch.device) -> bool:
    from gcore_trainer.packing.layer_kernels import rotate

    q = _random(1, 4, 5, _SIZE, device=device)
    k = _random(1, 2, 5, _SIZE, device=device)
    # Angles of both halves differ, so that any other pairs give another result.
    angles = 9 * _random(1, 5, _SIZE, device=device)
    cos = angles.cos()
    sin = angles.sin()
    expected_q, expected_k = original(q, k, cos, sin)
    rotated_q, rotated_k = rotate(q, k, cos, sin)
    return _close(expected_q, rotated_q) and _close(expected_k, rotated_k)
