"""The shape of a transformer: its parameters, memory and floating-point operations, from its `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gcore_placement.errors import PlacementError, check_lengths, check_positive, refusal, required

FORWARD_AND_BACKWARD = 3
"""A backward pass multiplies each matrix twice, for the gradients of its input and of its weight."""

MOE_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_moe_layers")
UNDESCRIBED_KEYS = ("n_routed_experts", "n_shared_experts", "shared_expert_intermediate_size", "kv_lora_rank")
"""Shared experts and compressed keys and values are work that the fields below do not hold."""


@dataclass(frozen=True, kw_only=True)
class TransformerWorkload:
    """The shape of a decoder with gated MLPs and grouped-query, full causal attention.

    Dense (Llama, Mistral, Qwen2, Qwen3), or with a mixture of experts in the place of some MLPs (Mixtral, Qwen3-MoE).
    Fields carry their Hugging Face names; every one is an integer of at least 1, but for those of the mixture, which a
    dense model leaves at 0; num_key_value_heads divides num_attention_heads.

    Raises:
        PlacementError: a field is out of these bounds.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    """Width of one expert."""
    num_moe_layers: int = 0
    """Layers whose MLP is a mixture of experts; the others have one of intermediate_size."""

    def __post_init__(self) -> None:
        is_mixture = any(getattr(self, name) != 0 for name in MOE_FIELDS)
        for field in fields(self):
            if is_mixture or field.name not in MOE_FIELDS:
                check_positive(field.name, getattr(self, field.name))
        for name, most in (("num_moe_layers", "num_hidden_layers"), ("num_experts_per_tok", "num_experts")):
            if getattr(self, name) > getattr(self, most):
                raise refusal(name, getattr(self, name), f"at most {most} ({getattr(self, most)})")
        if self.num_attention_heads % self.num_key_value_heads:
            raise refusal(
                "num_key_value_heads",
                self.num_key_value_heads,
                f"a divisor of num_attention_heads ({self.num_attention_heads})",
            )

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        """Reads the mapping in a Hugging Face `config.json`, with transformers' defaults for what may be left out.

        `num_key_value_heads` defaults to `num_attention_heads`, `head_dim` to `hidden_size / num_attention_heads`.

        Raises:
            PlacementError: a key is missing (it is named), a value is out of bounds, or the model has shared experts
                or compressed keys and values, whose work this shape does not describe.
        """
        for key in UNDESCRIBED_KEYS:
            if config.get(key):
                raise refusal(key, config[key], "absent (shared experts and compressed attention are not described)")
        shape = {
            key: required(config, key)
            for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        }
        for key, value in shape.items():
            check_positive(key, value)
        sizes = cast("dict[str, int]", shape)
        hidden_size, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        head_dim = config.get("head_dim")
        if head_dim is None:
            if hidden_size % heads:
                raise PlacementError(
                    f"config has no 'head_dim', and hidden_size ({hidden_size}) is not a multiple of "
                    f"num_attention_heads ({heads}): give 'head_dim'"
                )
            head_dim = hidden_size // heads
        key_value_heads = config.get("num_key_value_heads")
        return cls(
            **sizes,
            num_key_value_heads=cast("int", heads if key_value_heads is None else key_value_heads),
            head_dim=cast("int", head_dim),
            **_mixture(config, sizes),
        )

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def flops_per_token(self) -> float:
        """The linear term of `flops`, per token."""
        attention_weights = self.hidden_size * (2 * self.query_size + 2 * self.key_value_size)
        mlp_weights = 3 * self.hidden_size * self.intermediate_size
        moe_weights = self.hidden_size * (3 * self.num_experts_per_tok * self.moe_intermediate_size + self.num_experts)
        weights = (
            self.num_hidden_layers * attention_weights
            + (self.num_hidden_layers - self.num_moe_layers) * mlp_weights
            + self.num_moe_layers * moe_weights
            + self.hidden_size * self.vocab_size
        )
        return float(FORWARD_AND_BACKWARD * 2 * weights)

    @property
    def flops_per_attended_pair(self) -> float:
        """The attention term of `flops`, per pair of a query token and a key token it attends to."""
        return float(FORWARD_AND_BACKWARD * 4 * self.num_hidden_layers * self.query_size)

    def flops(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """Model FLOPs of one forward and backward pass over sequences that attend only to themselves.

        For a sequence of L tokens, with h = hidden_size, i = intermediate_size, n = num_hidden_layers,
        q = num_attention_heads * head_dim, kv = num_key_value_heads * head_dim, V = vocab_size:

            3 * [ 2 L (n (2 h q + 2 h kv + 3 h i) + h V)  +  4 n q L (L + 1) / 2 ]

        The first term is every weight matrix and the output head at 2 FLOPs per weight and token; the second is
        Q K^T and the weighted sum of V over the L (L + 1) / 2 causal pairs; 3 is forward plus backward. These are the
        terms of Narayanan et al. 2021 (arXiv:2104.04473, appendix: 72 B s l h^2 (1 + s / 6h + V / 12lh) once its
        recomputed forward is left out) for gated MLPs and grouped queries, with masked pairs not counted. Embedding
        look-ups, norms, softmax and rotary embeddings, of lower order, are left out, and so is any recomputation.
        In a layer with a mixture of experts, those that a token goes through and the router stand in the place of 3 h
        i.

        Args:
            lengths: tokens per sequence, any shape.

        Returns:
            FLOPs, of the shape of `lengths`.

        Raises:
            PlacementError: a length is negative, not finite or not whole.
        """
        tokens = check_lengths("lengths", lengths)
        return self._flops(tokens=tokens, pairs=tokens * (tokens + 1) / 2)

    def group_flops(self, prompt_length: ArrayLike, response_lengths: ArrayLike) -> NDArray[np.float64]:
        """Model FLOPs of one forward and backward pass over groups whose responses share a prompt computed once.

        With P prompt tokens and responses of R_1 ... R_n tokens, the formula of `flops` over P + sum R_j tokens and
        P (P + 1) / 2 + sum [R_j P + R_j (R_j + 1) / 2] pairs: the prompt is causal, each response token attends to the
        prompt, to itself and to what came before it in its own response. One response gives `flops(P + R_1)`.

        Args:
            prompt_length: tokens of the prompt; a scalar, or shape [...] with one per group.
            response_lengths: tokens of each response, shape [..., n]; groups of unequal size are padded with 0.

        Returns:
            FLOPs of each whole group, shape [...]; 0-dimensional for one group.

        Raises:
            PlacementError: a length is negative, not finite or not whole, or the shapes do not fit each other.
        """
        prompts = check_lengths("prompt_length", prompt_length)
        responses = check_lengths("response_lengths", response_lengths)
        if responses.ndim == 0 or prompts.shape not in ((), responses.shape[:-1]):
            raise refusal(
                "response_lengths.shape", responses.shape, f"prompt_length's shape {prompts.shape} and one more axis"
            )
        tokens = prompts + responses.sum(axis=-1)
        within_responses = (responses * (responses + 1) / 2).sum(axis=-1)
        pairs = prompts * (prompts + 1) / 2 + prompts * responses.sum(axis=-1) + within_responses
        return self._flops(tokens=tokens, pairs=pairs)

    def _flops(self, *, tokens: NDArray[np.float64], pairs: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(self.flops_per_token * tokens + self.flops_per_attended_pair * pairs, dtype=np.float64)


def _mixture(config: Mapping[str, object], sizes: Mapping[str, int]) -> dict[str, int]:
    """The fields of the mixture of experts; none for a dense model."""
    num_experts = config.get("num_experts") or config.get("num_local_experts")
    if not num_experts:
        return {}
    dense_layers: Any = config.get("mlp_only_layers") or []
    if not isinstance(dense_layers, list):
        raise refusal("mlp_only_layers", dense_layers, "a list of layers' indices")
    sparse_step = cast("int", config.get("decoder_sparse_step") or 1)
    check_positive("decoder_sparse_step", sparse_step)
    # Every decoder_sparse_step-th layer, but for those that are listed as dense (transformers' Qwen3MoeDecoderLayer).
    moe_layers = {i for i in range(sizes["num_hidden_layers"]) if (i + 1) % sparse_step == 0}.difference(
        cast("list[int]", dense_layers)
    )
    if not moe_layers:
        return {}
    return {
        "num_experts": cast("int", num_experts),
        "num_experts_per_tok": cast("int", required(config, "num_experts_per_tok")),
        "moe_intermediate_size": cast("int", config.get("moe_intermediate_size") or sizes["intermediate_size"]),
        "num_moe_layers": len(moe_layers),
    }


MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model's shape for the planner: the work of a token, and the memory.

    Counts are exact: they are those of transformers' causal language models.
    """

    workload: TransformerWorkload
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    """The projection after attention has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised, head by head."""

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        """Read the mapping in a `config.json`.

        Raises:
            PlacementError: `model_type` is not one of MODEL_TYPES, or the work of a token cannot be read; see
                `TransformerWorkload.from_config`.
        """
        model_type = required(config, "model_type")
        if model_type not in MODEL_TYPES:
            raise refusal("model_type", model_type, f"one of {', '.join(MODEL_TYPES)}")
        attention_bias = bool(config.get("attention_bias")) and model_type in ("llama", "qwen3", "qwen3_moe")
        return cls(
            workload=TransformerWorkload.from_config(_with_defaults(config)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings")),
            qkv_bias=attention_bias or model_type == "qwen2",
            output_bias=attention_bias,
            mlp_bias=bool(config.get("mlp_bias")) and model_type == "llama",
            qk_norm=model_type in ("qwen3", "qwen3_moe"),
        )

    @property
    def num_parameters(self) -> int:
        """All parameters; tied embeddings count once."""
        w = self.workload
        return w.num_hidden_layers * self._attention_parameters + self._mlp_parameters + self.num_outer_parameters

    @property
    def num_active_parameters(self) -> int:
        """Parameters that a token meets; of the experts, those that it is sent to."""
        w = self.workload
        asleep = w.num_experts - w.num_experts_per_tok
        return self.num_parameters - w.num_moe_layers * asleep * self._expert_parameters

    @property
    def num_multiplied_parameters(self) -> int:
        """Active parameters that a token is multiplied by: all but embeddings that are not also the head."""
        return self.num_active_parameters - self._num_looked_up

    @property
    def num_outer_parameters(self) -> int:
        """Parameters outside the layers: the embedding, the last norm and the head."""
        w = self.workload
        return w.hidden_size * (w.vocab_size * (1 if self.tie_word_embeddings else 2) + 1)

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of the mean layer, rounded up."""
        return -(-(self.num_parameters - self.num_outer_parameters) // self.workload.num_hidden_layers)

    @property
    def head_flops_per_token(self) -> int:
        """FLOPs of the logits, forward and backward, which the workload includes."""
        return 6 * self.workload.hidden_size * self.workload.vocab_size

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that a token's keys and values are, in all layers."""
        return 2 * self.workload.num_hidden_layers * self.workload.key_value_size

    @property
    def activations_per_token(self) -> int:
        """Numbers that the backward pass of the mean layer needs of a token.

        Inputs and outputs of both norms, 4 h; queries and what attention gives, 2 q; keys and values, 2 kv; gate, up,
        their activation and product, 4 i; each once. This is Korthikanti et al. 2022 (arXiv 2205.05198, equation 1)
        for gated MLPs and grouped queries, without dropout and with attention that keeps no scores (arXiv 2205.14135);
        a mixture of experts has i of all experts that a token goes through, and that many copies of h in and out.
        """
        w = self.workload
        outside = 4 * w.hidden_size + 2 * w.query_size + 2 * w.key_value_size
        dense = 4 * w.intermediate_size
        mixture = w.num_experts_per_tok * (4 * w.moe_intermediate_size + 2 * w.hidden_size)
        moe_layers = w.num_moe_layers
        mlps = moe_layers * mixture + (w.num_hidden_layers - moe_layers) * dense
        return outside + -(-mlps // w.num_hidden_layers)

    def parameters_read(self, num_tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the parameters that forward passes over so many tokens each read.

        Experts that no token goes to are not, nor, but for a row a token, embeddings that are not the head, too.
        """
        w, multiplied = self.workload, self.num_parameters - self._num_looked_up
        if not w.num_experts:
            return np.full(num_tokens.shape, float(multiplied))
        asleep = w.num_experts * (1 - w.num_experts_per_tok / w.num_experts) ** num_tokens
        return multiplied - w.num_moe_layers * asleep * self._expert_parameters

    @property
    def _num_looked_up(self) -> int:
        return 0 if self.tie_word_embeddings else self.workload.vocab_size * self.workload.hidden_size

    @property
    def _attention_parameters(self) -> int:
        """Parameters of a layer's attention and norms."""
        w = self.workload
        h, q, kv = w.hidden_size, w.query_size, w.key_value_size
        biases = self.qkv_bias * (q + 2 * kv) + self.output_bias * h
        return h * (2 * q + 2 * kv) + biases + self.qk_norm * 2 * w.head_dim + 2 * h

    @property
    def _expert_parameters(self) -> int:
        return 3 * self.workload.hidden_size * self.workload.moe_intermediate_size

    @property
    def _mlp_parameters(self) -> int:
        """Parameters of the MLPs of all layers."""
        w = self.workload
        h, i = w.hidden_size, w.intermediate_size
        mixture = w.num_experts * (self._expert_parameters + h)
        dense = 3 * h * i + self.mlp_bias * (2 * i + h)
        return w.num_moe_layers * mixture + (w.num_hidden_layers - w.num_moe_layers) * dense


def _with_defaults(config: Mapping[str, object]) -> Mapping[str, object]:
    """Qwen3's heads have a width of their own where the config names none."""
    if config.get("head_dim") is None and config.get("model_type") == "qwen3":
        return {**config, "head_dim": 128}
    return config
