"""The context in which Megatron-Core is called: on CPU over gloo it has stand-ins for CUDA's functions.

Megatron-Core reaches its device through functions of ``torch.cuda``, and through the word "cuda" in calls that make
tensors. On CPU, both are redirected: the functions for the process, the word for the thread. On CUDA neither is; there,
one missing name is bound, and torch's product takes the place of a kernel of apex.
"""

import warnings
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import megatron.core.tensor_parallel.random as megatron_random
import torch
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch.overrides import TorchFunctionMode

from gcore_trainer.packing.accumulating_linear import add_gradient

_PRODUCTS: dict[str, Any] = {
    "fused_weight_gradient_mlp_cuda": SimpleNamespace(wgrad_gemm_accum_fp32=add_gradient),
    "_grad_accum_fusion_available": True,
}
"""Names of Megatron-Core's linear layers for the kernel with which ``gradient_accumulation_fusion`` adds gradients."""


@contextmanager
def megatron_runtime(device: torch.device) -> Generator[None]:
    """Call Megatron-Core on a device within this context, in this thread."""
    with warnings.catch_warnings(), ExitStack() as stack:
        # Settings and functions that Megatron-Core itself uses are deprecated; a user cannot change them.
        warnings.filterwarnings("ignore", message=".*deprecated", module="megatron")
        warnings.filterwarnings(
            "ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger"
        )
        # Of inputs of functions that Megatron-Core hands to torch.compile, by torch itself.
        warnings.filterwarnings(
            "ignore", message=r"The \.grad attribute of a Tensor that is not a leaf"
        )
        # Linear layers of attention are called in another order than they are registered in; only waits are longer.
        warnings.filterwarnings("ignore", message="The next bucket's parameter all-gather")
        # 0.16.1 leaves the name unbound where Transformer Engine is not installed, and its router then fails with a
        # NameError on any device; where the name is None, the router computes with torch.
        router_gemm = getattr(moe_utils, "te_general_gemm", None)
        stack.enter_context(
            mock.patch.object(moe_utils, "te_general_gemm", router_gemm, create=True)
        )
        stack.enter_context(mock.patch.multiple(layers, create=True, **_PRODUCTS))
        if device.type != "cpu":
            yield
            return
        for owner, names in _patches():
            stack.enter_context(mock.patch.multiple(owner, **names))
        # Functions that Megatron hands to torch.compile would be compiled by a C++ compiler, at their first call.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_CudaToCpu())
        yield


def _patches() -> list[tuple[Any, dict[str, Any]]]:
    def rng_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        del record_stream
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return [
        (
            torch.cuda,
            {
                # Devices are asked for by number or name, and parameters are made there.
                "current_device": lambda: torch.device("cpu"),
                "synchronize": lambda *_: None,
                # The dispatcher of experts copies on a stream of its own.
                "Stream": _Stream,
                "stream": torch.cpu.stream,
                "current_stream": lambda *_: torch.cpu.current_stream(),
                # There is one generator of random numbers, and it is the CPU's.
                "manual_seed": torch.manual_seed,
                "get_rng_state": rng_state,
            },
        ),
        (torch.cuda.random, {"get_rng_state": rng_state}),
        (
            megatron_random,
            {"_set_cuda_rng_state": lambda state, *_, **__: torch.set_rng_state(state)},
        ),
        # It moves CUDA tensors only, and all-to-all needs its counts as numbers.
        (token_dispatcher, {"maybe_move_tensor_to_cpu": on_cpu}),
    ]


class _CudaToCpu(TorchFunctionMode):
    """Tensors that are asked for on "cuda" are made on CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not keywords:
            # Optimizers and clipping accept only what calls itself torch.cuda.FloatTensor or torch.cuda.BFloat16Tensor.
            return func(*args).replace("torch.", "torch.cuda.")
        if str(keywords.get("device")).startswith("cuda"):
            keywords["device"] = "cpu"
        # It needs an accelerator.
        keywords.pop("pin_memory", None)
        return func(*args, **keywords)


class _Stream(torch.cpu.Stream):
    """A class, for it stands in annotations; the CPU's own takes no arguments and records no event."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs
        super().__init__()

    def record_event(self, event: Any = None) -> Any:
        return event or torch.cpu.Event()
