"""Settings of Megatron-Core that follow from a trainer's own and from its device."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.fused_a2a import HAVE_DEEP_EP

from gcore_trainer.config import MegatronConfig, require
from gcore_trainer.megatron.architecture import Architecture
from gcore_trainer.megatron.experts import ALIGNMENT_BYTES
from gcore_trainer.torch.activations import LARGE_MODEL

_DEEPEP_RANKS = (2, 4, 8, 16, 32, 64, 128)
"""Sizes of groups that DeepEP has kernels for: within a node, or of nodes of 8."""


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


def fusion_options(config: MegatronConfig, *, device_type: str, has_te: bool) -> dict[str, Any]:
    """Return settings of Megatron-Core's ``TransformerConfig``; fusions that are not named are off by default."""
    fuses_activation = config.bias_activation_fusion
    if fuses_activation == "auto":
        fuses_activation = device_type == "cuda"
    # The youngest of these functions of Transformer Engine; None without it.
    sorts_chunks = getattr(moe_utils, "fused_sort_chunks_by_index_with_probs", None)
    return {
        "bias_activation_fusion": fuses_activation,
        "gradient_accumulation_fusion": device_type == "cuda",
        "moe_permute_fusion": has_te and sorts_chunks is not None,
    }


def dispatcher_options(
    num_expert_ranks: int, *, device_type: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the dispatcher of tokens to experts: DeepEP's where it is installed and has kernels, else all-to-all."""
    has_kernels = num_expert_ranks in _DEEPEP_RANKS and dtype == torch.bfloat16
    uses_deepep = HAVE_DEEP_EP and device_type == "cuda" and has_kernels
    # Rows of any length need one of the two, whether there are experts or not.
    return {"moe_token_dispatcher_type": "flex" if uses_deepep else "alltoall"}


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


def data_parallel_options(
    config: MegatronConfig, *, device_type: str, num_ranks: int, has_lora: bool
) -> dict[str, Any]:
    """Return settings of Megatron-Core's ``DistributedDataParallelConfig``; ``num_ranks`` add up their gradients."""
    config.check()
    reduces = config.overlap_grad_reduce
    gathers = config.overlap_param_gather
    if reduces == "auto":
        reduces = gathers is True or (device_type == "cuda" and num_ranks > 1)
    if gathers == "auto":
        gathers = reduces and device_type == "cuda" and not has_lora
    return {
        "use_distributed_optimizer": True,
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": reduces,
        "overlap_param_gather": gathers,
        "bucket_size": config.bucket_size,
    }
