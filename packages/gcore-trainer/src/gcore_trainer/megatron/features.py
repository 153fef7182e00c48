"""Settings of Megatron-Core that follow from a trainer's own and from its device."""

from collections.abc import Callable
from typing import Any

import torch

from gcore_trainer.config import MegatronConfig, require
from gcore_trainer.megatron.architecture import Architecture
from gcore_trainer.megatron.experts import ALIGNMENT_BYTES
from gcore_trainer.torch.activations import LARGE_MODEL


def recompute_options(
    config: MegatronConfig, *, device_type: str, num_parameters: Callable[[], int]
) -> dict[str, Any]:
    """Return settings of Megatron-Core's ``TransformerConfig``; parameters are counted only where they matter."""
    granularity = config.recompute_granularity
    if granularity == "auto":
        is_large = device_type == "cuda" and num_parameters() >= LARGE_MODEL
        granularity = "full" if is_large else "none"
    if granularity == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if granularity == "selective":
        # Attention keeps no scores here; what an MLP keeps is most of a layer's.
        return {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]}
    return {}


def fusion_options(config: MegatronConfig, *, device_type: str) -> dict[str, Any]:
    """Return settings of Megatron-Core's ``TransformerConfig``; `MegatronConfig` says why most fusions are off."""
    fuses_activation = config.bias_activation_fusion
    if fuses_activation == "auto":
        fuses_activation = device_type == "cuda"
    return {
        "bias_activation_fusion": fuses_activation,
        "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
    }


def has_grouped_experts(
    config: MegatronConfig, architecture: Architecture, *, device_type: str, dtype: torch.dtype
) -> bool:
    """Return whether a rank's experts are one parameter; raise `ConfigError` where they are to be and cannot."""
    if not architecture.num_experts:
        return False
    setting = config.grouped_gemm
    hidden = architecture.hf_config.hidden_size
    ffn = architecture.hf_config.moe_intermediate_size
    multiple = ALIGNMENT_BYTES // dtype.itemsize
    fits = hidden % multiple == 0 and ffn % multiple == 0
    is_there = hasattr(torch.nn.functional, "grouped_mm")
    if setting == "auto":
        # On CUDA, experts of other types are multiplied one after the other all the same.
        return fits and is_there and device_type == "cuda" and dtype == torch.bfloat16
    if setting:
        require("grouped_gemm", setting, is_there, "auto or false before torch 2.10")
        sizes = f"hidden_size {hidden} and moe_intermediate_size {ffn}"
        accepted = (
            f"false for {sizes}, of which one is not a multiple of {multiple}, as {dtype} needs"
        )
        require("grouped_gemm", setting, fits, accepted)
    return setting


def uses_transformer_engine(
    config: MegatronConfig, *, device_type: str, is_installed: bool, has_lora: bool
) -> bool:
    """Return whether linear layers are Transformer Engine's; raise `ConfigError` where they are to be and cannot."""
    setting = config.transformer_engine
    if setting == "auto":
        return device_type == "cuda" and is_installed and not has_lora
    if setting:
        name = "transformer_engine"
        require(
            name, setting, device_type == "cuda", f"auto or false on {device_type}: it needs CUDA"
        )
        hint = "auto or false where it is not installed: pip install 'transformer-engine[pytorch]'"
        require(name, setting, is_installed, hint)
        require(
            name, setting, not has_lora, "auto or false with lora: adapters are of other layers"
        )
    return setting


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
