"""Architectures of Hugging Face models for Megatron-Core, the layouts that divide them, and process groups."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from gcore_trainer.config import ParallelConfig, require
from gcore_trainer.context_parallel.groups import ContextParallel, make_context_parallel
from gcore_trainer.errors import ConfigError, UnsupportedModelError

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Known architectures, by their ``model_type``."""
_ROPE_TYPES = ("default", "llama3")
_NEUTRAL: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "quantization_config": None,
}
"""Settings of those architectures that are not converted, each with the only value that is accepted."""


class Architecture:
    """A decoder of one of `MODEL_TYPES`, by its config of transformers; `UnsupportedModelError` for any other."""

    def __init__(self, hf_config: Any) -> None:
        model_type = hf_config.model_type
        if model_type not in MODEL_TYPES:
            raise UnsupportedModelError(
                f"model_type is {model_type!r}; expected one of {', '.join(MODEL_TYPES)}"
            )
        for name, neutral in _NEUTRAL.items():
            value = getattr(hf_config, name, neutral)
            if value not in (neutral, None):
                raise UnsupportedModelError(
                    f"{name} of {model_type!r} is {value!r}; expected {neutral!r}"
                )
        unsupported = sorted(
            set(getattr(hf_config, "layer_types", None) or ()) - {"full_attention"}
        )
        if unsupported:
            raise UnsupportedModelError(
                f"layer_types of {model_type!r} has {', '.join(unsupported)}; expected full_attention only: the torch "
                "backend computes sliding_attention"
            )
        rope = hf_config.rope_parameters
        if rope["rope_type"] not in _ROPE_TYPES:
            raise UnsupportedModelError(
                f"rope_type of {model_type!r} is {rope['rope_type']!r}; expected one of {', '.join(_ROPE_TYPES)}"
            )
        share = rope.get("partial_rotary_factor", 1.0)
        if share != 1.0:
            raise UnsupportedModelError(
                f"partial_rotary_factor of {model_type!r} is {share}; expected 1.0"
            )
        self.hf_config = hf_config
        self.num_layers: int = hf_config.num_hidden_layers
        self.num_heads: int = hf_config.num_attention_heads
        self.num_query_groups: int = hf_config.num_key_value_heads
        """Key-value heads."""
        self.head_dim: int = (
            getattr(hf_config, "head_dim", None) or hf_config.hidden_size // self.num_heads
        )
        self.has_qkv_bias = model_type == "qwen2"
        self.has_qk_norm = model_type in ("qwen3", "qwen3_moe")
        self.is_tied: bool = hf_config.tie_word_embeddings
        """The head is the embedding."""
        self.num_experts: int = hf_config.num_experts if model_type == "qwen3_moe" else 0
        """Experts of each feed-forward layer; 0: it is dense."""

    def check_layout(self, parallel: ParallelConfig, world_size: int) -> None:
        """Raise `ConfigError` for a layout that does not divide the world or the model."""
        shards = parallel.fsdp_size
        require(
            "fsdp_size", shards, shards == 0, "0 for the megatron backend, or the torch backend"
        )
        pp = parallel.pipeline_model_parallel_size
        vpp = parallel.virtual_pipeline_model_parallel_size
        tp = parallel.tensor_model_parallel_size
        ep = parallel.expert_model_parallel_size
        ranks_of_stage = parallel.data_parallel_size(world_size) * (
            parallel.model_parallel_size // pp
        )
        pipeline = f"pipeline_model_parallel_size={pp}"
        if vpp > 1:
            pipeline += f" x virtual_pipeline_model_parallel_size={vpp}"
        _require_divides("tensor_model_parallel_size", tp, "attention heads", self.num_heads)
        groups = self.num_query_groups
        if groups % tp and tp % groups:
            accepted = [n for n in _divisors(self.num_heads) if groups % n == 0 or n % groups == 0]
            raise ConfigError(
                f"tensor_model_parallel_size={tp} neither divides {groups} key-value heads nor is a multiple of them; "
                f"expected one of {accepted}"
            )
        # Above the number of key-value heads ranks have rows of them, gather the products, and take what they need.
        rows = (self.num_heads + 2 * groups) * self.head_dim
        _require_divides("tensor_model_parallel_size", tp, "rows of queries, keys and values", rows)
        _require_divides(pipeline, pp * vpp, "layers", self.num_layers)
        if not self.num_experts:
            if ep > 1:
                raise ConfigError(
                    f"expert_model_parallel_size is {ep}; expected 1 for a model without experts"
                )
            _require_divides(
                "tensor_model_parallel_size",
                tp,
                "columns of the MLP",
                self.hf_config.intermediate_size,
            )
            return
        _require_divides("expert_model_parallel_size", ep, "experts", self.num_experts)
        _require_divides(
            "expert_model_parallel_size", ep, "ranks of a pipeline stage", ranks_of_stage
        )
        if tp > 1 and not parallel.sequence_parallel:
            raise ConfigError(
                f"sequence_parallel is false with tensor_model_parallel_size={tp} and {self.num_experts} "
                "experts; expected true, so that tensor-parallel ranks route different tokens"
            )
        if tp > 1 and ep == 1:
            raise ConfigError(
                f"expert_model_parallel_size is 1 with tensor_model_parallel_size={tp}; expected more, because "
                f"single experts are not divided: {_divisors(self.num_experts, ranks_of_stage)[1:]} would fit"
            )


def _require_divides(name: str, value: int, what: str, count: int) -> None:
    if count % value:
        size = name if "=" in name else f"{name}={value}"
        raise ConfigError(
            f"{size} does not divide {count} {what}; expected one of {_divisors(count)}"
        )


def _divisors(*counts: int) -> list[int]:
    return [n for n in range(1, min(counts) + 1) if all(count % n == 0 for count in counts)]


joined: tuple[ParallelConfig, ContextParallel] | None = None
"""The layout and groups of this process."""


def sizes_of(parallel: ParallelConfig) -> dict[str, Any]:
    """Return the sizes under Megatron-Core's names."""
    vpp = parallel.virtual_pipeline_model_parallel_size
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
        "context_parallel_size": parallel.context_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": 1,
    }


def join_groups(parallel: ParallelConfig, device: torch.device) -> ContextParallel:
    """Return the context-parallel groups, made by the first trainer of this process; all ranks call this together.

    Ranks are numbered as Megatron-Core does: tensor parallel ranks are neighbours, then context, data, pipeline.
    """
    global joined
    if joined is not None:
        if joined[0] != parallel:
            raise ConfigError(
                f"parallel is {parallel}; expected {joined[0]}, the layout of this process: Megatron-Core has only one"
            )
        return joined[1]
    parallel_state.initialize_model_parallel(**sizes_of(parallel), create_gloo_process_groups=False)
    # No random number is drawn, but sequence parallelism and recomputation switch between generators all the same.
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices):
        model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    context_parallel = ContextParallel()
    if parallel.context_parallel_size > 1:
        groups: list[Any] = [None] * dist.get_world_size()
        context_group: Any = parallel_state.get_context_parallel_group()
        dist.all_gather_object(groups, dist.get_process_group_ranks(context_group))
        unique = sorted({tuple(ranks) for ranks in groups})
        context_parallel = make_context_parallel(
            [list(r) for r in unique], parallel.ulysses_sequence_parallel_size
        )
    joined = parallel, context_parallel
    return context_parallel
