"""Megatron-Core's GPT of an `Architecture`, whose last stage ends before the head."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gcore_trainer.config import ParallelConfig
from gcore_trainer.megatron.architecture import Architecture, sizes_of
from gcore_trainer.megatron.experts import GroupedExperts
from gcore_trainer.packing.block_attention import AttentionKind
from gcore_trainer.packing.row import Row


class HiddenStatesGPT(GPTModel):
    """A stage of the model. The last one returns normed hidden states [T, 1, D], of which few need logits."""

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        del args, kwargs
        return hidden_states


class RMSNorm(torch.nn.RMSNorm):
    """torch's norm with a mark for sequence parallelism, which Megatron-Core's wrapper refuses."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, **options: Any
    ) -> None:
        del options
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # With sequence parallelism each rank has a partial gradient; Megatron-Core sums them.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]


class PlanAttention(torch.nn.Module):
    """Replaces Megatron-Core's dot-product attention, which knows neither packing nor context parallelism."""

    def __init__(self, softmax_scale: float | None = None, **options: Any) -> None:
        super().__init__()
        del options
        self._kind = AttentionKind(scale=softmax_scale)

    def forward(
        self,
        query_T1HD: torch.Tensor,
        key_T1KD: torch.Tensor,
        value_T1KD: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: Row,
        **options: Any,
    ) -> torch.Tensor:
        """Compute the attention output [T, 1, H * D]."""
        del attention_mask, options
        q_1HTD = query_T1HD.permute(1, 2, 0, 3)
        k_1KTD = key_T1KD.permute(1, 2, 0, 3)
        v_1KTD = value_T1KD.permute(1, 2, 0, 3)
        out_1THD = packed_seq_params.plan.attend(q_1HTD, k_1KTD, v_1KTD, self._kind)
        return out_1THD[0].flatten(1).unsqueeze(1)


class RowRotary(torch.nn.Module):
    """Replaces Megatron-Core's rotary embedding: angles come from the row's positions, not from its length."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        # All known architectures have Llama's, and its scaled form.
        self._inv_freq: torch.Tensor = LlamaRotaryEmbedding(architecture.hf_config).inv_freq

    def get_rotary_seq_len(
        self, inference: Any, decoder: Any, hidden: Any, config: Any, row: Row
    ) -> Row:
        """Return the argument of `forward`."""
        del inference, decoder, hidden, config
        return row

    def forward(self, row: Row, **options: Any) -> torch.Tensor:
        """Return the angles [T, 1, 1, D] of the tokens that attention sees on this rank."""
        del options
        positions_T = row.positions[0]
        angles = positions_T.float()[:, None] * self._inv_freq.to(positions_T.device)
        return torch.cat([angles, angles], dim=-1)[:, None, None]


def transformer_config(
    architecture: Architecture,
    parallel: ParallelConfig,
    features: Mapping[str, Any],
    *,
    dtype: torch.dtype,
) -> TransformerConfig:
    """Describe the model and its layout for Megatron-Core, with further settings of it in ``features``."""
    hf = architecture.hf_config
    expert_options: dict[str, Any] = {}
    if architecture.num_experts:
        expert_options = {
            "num_moe_experts": architecture.num_experts,
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_ffn_hidden_size": hf.moe_intermediate_size,
            # Softmax over all experts, then their top k, against softmax over the top k: equal where they add up to 1.
            "moe_router_pre_softmax": not hf.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": False,
        }
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_query_groups=architecture.num_query_groups,
        num_attention_heads=architecture.num_heads,
        kv_channels=architecture.head_dim,
        layernorm_epsilon=hf.rms_norm_eps,
        add_qkv_bias=architecture.has_qkv_bias,
        qk_layernorm=architecture.has_qk_norm,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        **sizes_of(parallel),
        sequence_parallel=parallel.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Initialisation also marks what is divided, by which gradient norms are counted: it is done, with nothing.
        init_method=torch.nn.init.zeros_,
        output_layer_init_method=torch.nn.init.zeros_,
        embedding_init_method=torch.nn.init.zeros_,
        # The interleaved schedule mixes up lengths where a stage's next is also its previous one.
        variable_seq_lengths=parallel.virtual_pipeline_model_parallel_size == 1,
        # The same schedule mixes up batched messages there.
        batch_p2p_comm=False,
        # Do not average gradients: the loss is already normalised.
        calculate_per_token_loss=True,
        **expert_options,
        **features,
    )


def make_chunks(
    architecture: Architecture,
    parallel: ParallelConfig,
    config: TransformerConfig,
    *,
    has_value_head: bool,
    has_grouped_experts: bool,
    has_transformer_engine: bool,
) -> list[HiddenStatesGPT]:
    """Make this rank's layers, a chunk for each of its virtual stages; all matrices are 0."""
    layer = _layer_spec(config)
    if has_grouped_experts:
        layer.submodules.mlp.submodules.experts = ModuleSpec(module=GroupedExperts)
    if has_transformer_engine:
        _use_transformer_engine(layer.submodules, has_experts=architecture.num_experts > 0)
    norm: Any = RMSNorm
    vpp = parallel.virtual_pipeline_model_parallel_size
    tp = parallel.tensor_model_parallel_size
    chunks: list[HiddenStatesGPT] = []
    for stage in range(vpp):
        vp_stage = stage if vpp > 1 else None
        num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
        block: Any = TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=norm)
        chunk = HiddenStatesGPT(
            config,
            block,
            vocab_size=-(-architecture.hf_config.vocab_size // tp) * tp,
            max_sequence_length=architecture.hf_config.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(
                ignore_virtual=False, vp_stage=vp_stage
            ),
            post_process=parallel_state.is_pipeline_last_stage(
                ignore_virtual=False, vp_stage=vp_stage
            ),
            share_embeddings_and_output_weights=architecture.is_tied and not has_value_head,
            position_embedding_type="rope",
            vp_stage=vp_stage,
        )
        rotary: Any = RowRotary(architecture)
        chunk.rotary_pos_emb = rotary
        if chunk.post_process and has_value_head:
            del chunk.output_layer
            chunk.score = torch.nn.Linear(
                config.hidden_size, 1, bias=False, dtype=config.params_dtype
            )
            torch.nn.init.zeros_(chunk.score.weight)
        chunks.append(chunk)
    return chunks


def _layer_spec(config: TransformerConfig) -> Any:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    parts: Any = layer.submodules
    parts.input_layernorm = RMSNorm
    parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PlanAttention
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    return layer


def _use_transformer_engine(parts: Any, *, has_experts: bool) -> None:
    """Replace linear layers of attention and of a dense MLP by Transformer Engine's, fused with the norms before."""
    # A module of Megatron-Core that warns where Transformer Engine is missing.
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    provider = TESpecProvider()
    norm_and_column = provider.column_parallel_layer_norm_linear()
    row = provider.row_parallel_linear()
    attention = parts.self_attention.submodules
    attention.linear_qkv = norm_and_column
    attention.linear_proj = row
    parts.input_layernorm = IdentityOp
    if not has_experts:
        parts.mlp.submodules.linear_fc1 = norm_and_column
        parts.mlp.submodules.linear_fc2 = row
        parts.pre_mlp_layernorm = IdentityOp
