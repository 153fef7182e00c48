"""Settings of Megatron-Core that follow from a trainer's own and from its device."""

from collections.abc import Callable
from typing import Any

from gcore_trainer.megatron_config import MegatronConfig
from gcore_trainer.torch.activations import LARGE_MODEL


def recompute_options(config: MegatronConfig, *, device_type: str, num_parameters: Callable[[], int]) -> dict[str, Any]:
    """Return settings of Megatron-Core's ``TransformerConfig``; parameters are counted only where they matter."""
    granularity = config.recompute_granularity
    if granularity == "auto":
        granularity = "full" if device_type == "cuda" and num_parameters() >= LARGE_MODEL else "none"
    if granularity == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if granularity == "selective":
        # Attention keeps no scores here; what an MLP keeps is most of a layer's.
        return {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]}
    return {}


def data_parallel_options(config: MegatronConfig) -> dict[str, Any]:
    """Return settings of Megatron-Core's ``DistributedDataParallelConfig``."""
    config.check()
    return {
        "use_distributed_optimizer": True,
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": config.overlap_grad_reduce,
        "overlap_param_gather": config.overlap_param_gather,
        "bucket_size": config.bucket_size,
    }
