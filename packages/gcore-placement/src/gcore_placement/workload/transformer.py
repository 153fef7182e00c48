"""The shape of a decoder, and the FLOPs of training it on sequences and groups."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self, cast

import numpy as np
from numpy.typing import ArrayLike

from gcore_placement.errors import PlacementError, refusal
from gcore_placement.quantities import Floats, check_lengths, check_positive, required

FORWARD_AND_BACKWARD = 3
"""A backward pass multiplies each matrix twice, for the gradients of its input and of its weight."""
_TILE_ROWS = 128
_MOE_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_moe_layers")
_LATENT_FIELDS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_OPTIONAL_FIELDS = ("n_shared_experts", "q_lora_rank")


@dataclass(frozen=True, kw_only=True)
class TransformerWorkload:
    """The shape of a decoder with gated MLPs and full causal attention.

    Dense (Llama, Mistral, Qwen2, Qwen3), or with a mixture of experts in the place of some MLPs (Mixtral, Qwen3-MoE,
    DeepSeek-V3); attention with grouped queries, or latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1),
    which keeps one compressed state of a token for all heads. Fields carry their Hugging Face names; every one is an
    integer of at least 1, but for those of the mixture and of latent attention, which other models leave at 0;
    num_key_value_heads divides num_attention_heads.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Width of a query and of a key; with latent attention qk_nope_head_dim + qk_rope_head_dim."""
    vocab_size: int
    num_experts: int = 0
    """Experts among which a router chooses (`n_routed_experts` in DeepSeek's files)."""
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    """Width of one expert."""
    num_moe_layers: int = 0
    """Layers whose MLP is a mixture of experts; the others have one of intermediate_size."""
    n_shared_experts: int = 0
    """Experts of a mixture through which each token goes besides those that are chosen."""
    kv_lora_rank: int = 0
    """Width of the state from which keys and values of all heads are made: latent attention."""
    q_lora_rank: int = 0
    """Width of the state from which queries are made; 0: they are made from the hidden state."""
    qk_nope_head_dim: int = 0
    """Part of a key that is made from the compressed state, without rotary embedding."""
    qk_rope_head_dim: int = 0
    """Part of a key with rotary embedding, which all heads share, and which is kept besides the compressed state."""
    v_head_dim: int = 0

    def __post_init__(self) -> None:
        groups = (_MOE_FIELDS, _LATENT_FIELDS)
        unused = {name for group in groups if not any(getattr(self, name) for name in group) for name in group}
        for field in fields(self):
            if field.name in _OPTIONAL_FIELDS and not getattr(self, field.name):
                continue
            if field.name not in unused:
                check_positive(field.name, getattr(self, field.name))
        for name, needed in (("n_shared_experts", "num_experts"), ("q_lora_rank", "kv_lora_rank")):
            if needed in unused and getattr(self, name):
                raise refusal(name, getattr(self, name), f"0 without {needed}")
        for name, most in (("num_moe_layers", "num_hidden_layers"), ("num_experts_per_tok", "num_experts")):
            if getattr(self, name) > getattr(self, most):
                raise refusal(name, getattr(self, name), f"at most {most} ({getattr(self, most)})")
        if self.num_attention_heads % self.num_key_value_heads:
            accepted = f"a divisor of num_attention_heads ({self.num_attention_heads})"
            raise refusal("num_key_value_heads", self.num_key_value_heads, accepted)
        if self.is_latent and self.head_dim != self.qk_nope_head_dim + self.qk_rope_head_dim:
            accepted = f"qk_nope_head_dim + qk_rope_head_dim ({self.qk_nope_head_dim} + {self.qk_rope_head_dim})"
            raise refusal("head_dim", self.head_dim, accepted)

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        """Read the mapping in a Hugging Face `config.json`.

        `num_key_value_heads` defaults to `num_attention_heads`, `head_dim` to `hidden_size / num_attention_heads`.
        PlacementError names a key that is missing, out of bounds, or of work that this shape does not describe.
        """
        if shared := config.get("shared_expert_intermediate_size"):
            accepted = "absent (shared experts with a width of their own are not described)"
            raise refusal("shared_expert_intermediate_size", shared, accepted)
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        sizes: dict[str, Any] = {key: required(config, key) for key in names}
        for key, value in sizes.items():
            check_positive(key, value)
        others = {"n_shared_experts": cast("Any", config.get("n_shared_experts")) or 0, **_mixture(config, sizes)}
        return cls(**sizes, **_heads(config, sizes), **others)

    @property
    def is_latent(self) -> bool:
        """True if keys and values are made from a compressed state."""
        return self.kv_lora_rank > 0

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def value_size(self) -> int:
        """Width of what all heads of attention give together."""
        return self.num_attention_heads * (self.v_head_dim if self.is_latent else self.head_dim)

    @property
    def key_value_size(self) -> int:
        """Width of the keys and values of all their heads together, as attention multiplies them."""
        if self.is_latent:
            return self.query_size + self.value_size
        return 2 * self.num_key_value_heads * self.head_dim

    @property
    def cached_size(self) -> int:
        """Numbers that a layer's cache has of a token: keys and values, or the state that they are made from."""
        return self.kv_lora_rank + self.qk_rope_head_dim if self.is_latent else self.key_value_size

    @property
    def num_cached_heads(self) -> int:
        """Parts into which ranks can divide the cache of a token."""
        return 1 if self.is_latent else self.num_key_value_heads

    @property
    def attention_matrices(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the matrices of a layer's attention."""
        h, heads = self.hidden_size, self.num_attention_heads
        if not self.is_latent:
            key_size = self.key_value_size // 2
            return [(h, self.query_size), (h, key_size), (h, key_size), (self.value_size, h)]
        queries = [(h, self.query_size)]
        if self.q_lora_rank:
            queries = [(h, self.q_lora_rank), (self.q_lora_rank, self.query_size)]
        made = heads * (self.qk_nope_head_dim + self.v_head_dim)
        return [*queries, (h, self.cached_size), (self.kv_lora_rank, made), (self.value_size, h)]

    @property
    def num_attention_weights(self) -> int:
        """Weights of a layer's attention."""
        return sum(inputs * outputs for inputs, outputs in self.attention_matrices)

    @property
    def shared_experts_size(self) -> int:
        """Width of the MLP that the shared experts of a layer are together."""
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def flops_per_token(self) -> float:
        """The linear term of `flops`, per token."""
        mlp_weights = 3 * self.hidden_size * self.intermediate_size
        width = self.num_experts_per_tok * self.moe_intermediate_size + self.shared_experts_size
        moe_weights = self.hidden_size * (3 * width + self.num_experts)
        weights = (
            self.num_hidden_layers * self.num_attention_weights
            + (self.num_hidden_layers - self.num_moe_layers) * mlp_weights
            + self.num_moe_layers * moe_weights
            + self.hidden_size * self.vocab_size
        )
        return float(FORWARD_AND_BACKWARD * 2 * weights)

    @property
    def expert_flops_per_token(self) -> float:
        """The part of `flops_per_token` that the chosen experts of a mixture take; 0 without one."""
        width = self.num_experts_per_tok * self.moe_intermediate_size
        return float(FORWARD_AND_BACKWARD * 2 * self.num_moe_layers * 3 * self.hidden_size * width)

    def expert_tiles(self, tokens: Floats) -> Floats:
        """Return the rows that an expert computes over those that it is given, as so many tokens reach all experts.

        A product of matrices computes whole tiles of 128 rows: of M rows (M + 64) / M times as many on average.
        """
        if not self.num_experts:
            return np.ones_like(tokens)
        return 1 + _TILE_ROWS / 2 / (tokens * self.num_experts_per_tok / self.num_experts)

    @property
    def flops_per_attended_pair(self) -> float:
        """The attention term of `flops`, per pair of a query token and a key token it attends to."""
        return float(FORWARD_AND_BACKWARD * 2 * self.num_hidden_layers * (self.query_size + self.value_size))

    def flops(self, lengths: ArrayLike) -> Floats:
        """Return the model FLOPs of a forward and backward pass over sequences that attend only to themselves.

        For a sequence of L tokens, with h = hidden_size, i = intermediate_size, n = num_hidden_layers,
        q = num_attention_heads * head_dim, kv = num_key_value_heads * head_dim, V = vocab_size:

            3 * [ 2 L (n (2 h q + 2 h kv + 3 h i) + h V)  +  4 n q L (L + 1) / 2 ]

        The first term is every weight matrix and the output head at 2 FLOPs per weight and token; the second is
        Q K^T and the weighted sum of V over the causal pairs; 3 is forward plus backward. These are the terms of
        Narayanan et al. 2021 (arXiv:2104.04473, appendix: 72 B s l h^2 (1 + s / 6h + V / 12lh) once its recomputed
        forward is left out) for gated MLPs and grouped queries, with masked pairs not counted. Embedding look-ups,
        norms, softmax, rotary embeddings and recomputation are left out. In a layer with a mixture of experts, those
        that a token goes through and the router stand in the place of 3 h i; with latent attention its own matrices
        stand in the place of 2 h q + 2 h kv, and the widths of query and value in the place of 2 q.

        ``lengths`` are whole tokens, of any shape, which the result has.
        """
        tokens = check_lengths("lengths", lengths)
        return self._flops(tokens=tokens, pairs=tokens * (tokens + 1) / 2)

    def group_flops(self, prompt_length: ArrayLike, response_lengths: ArrayLike) -> Floats:
        """Return the model FLOPs of a training pass over groups whose responses share a prompt computed once.

        With P prompt tokens and responses of R_1 ... R_n tokens, the formula of `flops` over P + sum R_j tokens and
        P (P + 1) / 2 + sum [R_j P + R_j (R_j + 1) / 2] pairs: a response token attends to the prompt, to itself and to
        what came before it in its own response. One response gives `flops(P + R_1)`.

        Args:
            prompt_length: tokens of the prompt; a scalar, or shape [...] with one per group, as the result.
            response_lengths: tokens of each response, shape [..., n]; groups of unequal size are padded with 0.
        """
        prompts = check_lengths("prompt_length", prompt_length)
        responses = check_lengths("response_lengths", response_lengths)
        if responses.ndim == 0 or prompts.shape not in ((), responses.shape[:-1]):
            accepted = f"prompt_length's shape {prompts.shape} and one more axis"
            raise refusal("response_lengths.shape", responses.shape, accepted)
        tokens = prompts + responses.sum(axis=-1)
        within_responses = (responses * (responses + 1) / 2).sum(axis=-1)
        pairs = prompts * (prompts + 1) / 2 + prompts * responses.sum(axis=-1) + within_responses
        return self._flops(tokens=tokens, pairs=pairs)

    def _flops(self, *, tokens: Floats, pairs: Floats) -> Floats:
        return np.asarray(self.flops_per_token * tokens + self.flops_per_attended_pair * pairs, dtype=np.float64)


def _heads(config: Mapping[str, object], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the fields of attention's heads."""
    hidden_size, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if config.get("kv_lora_rank"):
        found = {key: cast("Any", required(config, key)) for key in _LATENT_FIELDS}
        for key, value in found.items():
            check_positive(key, value)
        head_dim = found["qk_nope_head_dim"] + found["qk_rope_head_dim"]
        queries: Any = config.get("q_lora_rank") or 0
        return {**found, "q_lora_rank": queries, "num_key_value_heads": heads, "head_dim": head_dim}
    if config.get("head_dim") is None and hidden_size % heads:
        raise PlacementError(
            f"config has no 'head_dim', and hidden_size ({hidden_size}) is not a multiple of "
            f"num_attention_heads ({heads}): give 'head_dim'"
        )
    defaults = {"num_key_value_heads": heads, "head_dim": hidden_size // heads}
    return {key: cast("Any", default if config.get(key) is None else config[key]) for key, default in defaults.items()}


def _mixture(config: Mapping[str, object], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the fields of the mixture of experts; none for a dense model."""
    num_experts: Any = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    if not num_experts:
        return {}
    dense_layers: Any = config.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list):
        raise refusal("mlp_only_layers", dense_layers, "a list of layers' indices")
    first_dense: Any = config.get("first_k_dense_replace") or 0
    if isinstance(first_dense, bool) or not isinstance(first_dense, int) or first_dense < 0:
        raise refusal("first_k_dense_replace", first_dense, "an integer of at least 0")
    sparse_step: Any = config.get("decoder_sparse_step") or 1
    check_positive("decoder_sparse_step", sparse_step)
    # Every decoder_sparse_step-th layer, but for those that are listed as dense (transformers' Qwen3MoeDecoderLayer),
    # and but for the first (its DeepseekV3DecoderLayer).
    moe_layers = set(range(sparse_step - 1, sizes["num_hidden_layers"], sparse_step)).difference(dense_layers)
    moe_layers = moe_layers.difference(range(first_dense))
    if not moe_layers:
        return {}
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": cast("int", required(config, "num_experts_per_tok")),
        "moe_intermediate_size": cast("int", config.get("moe_intermediate_size") or sizes["intermediate_size"]),
        "num_moe_layers": len(moe_layers),
    }
