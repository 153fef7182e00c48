"""Lets verl load new weights into vLLM on a CPU, which as published it can do on a GPU only."""

from typing import Any


def keep_loadable() -> None:
    """Leave vLLM's parameters as they are; it would replace them by copies packed for its matrix products."""
    import torch
    from vllm.model_executor.layers import utils

    def dispatch(layer: Any, remove_weight: bool) -> None:
        del remove_weight
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = dispatch
