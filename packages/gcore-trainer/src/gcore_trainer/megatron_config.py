"""Settings of the Megatron-Core backend, which can be read without Megatron-Core."""

from dataclasses import dataclass
from typing import Literal

from gcore_trainer.config import CheckedConfig, Count, ParallelConfig, require

Switch = bool | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class MegatronConfig(CheckedConfig):
    """Performance settings of Megatron-Core; results stay the same up to rounding.

    Other fusions of Megatron-Core are off. Of masked softmax and cross-entropy there is nothing to fuse: attention and
    the head are this package's. Biases, of which only some queries, keys and values have any, are added in the linear
    layer, and nothing is dropped. ``gradient_accumulation_fusion`` needs a kernel of apex in the embedding's and the
    head's layers, which are Megatron-Core's own even with Transformer Engine. ``apply_rope_fusion`` needs Transformer
    Engine's kernel, which takes these angles [T, 1, 1, D], but multiplies by sines in float32 where transformers, and
    the engine, round them to bfloat16 first: log-probabilities would differ from theirs.

    Example:
        >>> MegatronConfig(recompute_granularity="selective", overlap_grad_reduce=True).bucket_size
        40000000
    """

    recompute_granularity: Literal["auto", "none", "selective", "full"] = "auto"
    """The backward pass computes again nothing (none), MLPs and experts (selective), or whole layers (full);
    auto: full on CUDA for models of a billion parameters, else none."""
    overlap_grad_reduce: bool = False
    """Add up the replicas' gradients during the backward pass, bucket by bucket, instead of after it."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the next forward pass instead of before it; needs overlap_grad_reduce."""
    bucket_size: Count = 40_000_000
    """Parameters of a bucket, with overlap_grad_reduce."""
    grouped_gemm: Switch = "auto"
    """Experts of a rank are multiplied by one call of torch's grouped_mm, not one after the other; auto: on CUDA
    in bfloat16, where their sizes are multiples of 8. Dense models have none."""
    transformer_engine: Switch = "auto"
    """Linear layers of attention and of dense MLPs, each fused with the norm before it, are Transformer Engine's; auto:
    on CUDA where it is installed, without adapters. Attention itself, experts and other norms are as without it."""
    bias_activation_fusion: Switch = "auto"
    """SwiGLU is one compiled kernel forward and one backward; auto: on CUDA."""

    def check(self) -> None:
        """Raise `ConfigError` for settings that do not go together."""
        holds = self.overlap_grad_reduce or not self.overlap_param_gather
        require(
            "overlap_param_gather",
            self.overlap_param_gather,
            holds,
            "false without overlap_grad_reduce",
        )

    @staticmethod
    def environment(parallel: ParallelConfig, device_type: str) -> dict[str, str]:
        """Variables that a rank needs before its process uses the device.

        With tensor parallelism, communication runs next to matrix products, in an order that CUDA keeps if it has
        one queue.
        """
        is_needed = device_type == "cuda" and parallel.tensor_model_parallel_size > 1
        return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if is_needed else {}
