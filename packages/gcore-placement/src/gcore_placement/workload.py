"""Simulated workload: the floating-point operations a dense transformer spends on sequences, from its shape alone."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gcore_placement.errors import PlacementError, check_lengths, check_positive, refusal, required

FORWARD_AND_BACKWARD = 3
"""A backward pass multiplies each matrix twice, for the gradients of its input and of its weight."""

EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, kw_only=True)
class TransformerWorkload:
    """The shape of a dense decoder with gated MLPs and grouped-query, full causal attention (Llama, Qwen2, Qwen3).

    Fields carry their Hugging Face names; every one is an integer of at least 1, and num_key_value_heads divides
    num_attention_heads.

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

    def __post_init__(self) -> None:
        for field in fields(self):
            check_positive(field.name, getattr(self, field.name))
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
            PlacementError: a key is missing (it is named), a value is out of bounds, or the model is a mixture of
                experts, whose work per token this shape does not describe.
        """
        for key in EXPERT_KEYS:
            if config.get(key):
                raise refusal(key, config[key], "absent (mixture-of-experts models are not described by this workload)")
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
        )

    @property
    def flops_per_token(self) -> float:
        """The linear term of `flops`, per token."""
        query_size = self.num_attention_heads * self.head_dim
        key_value_size = self.num_key_value_heads * self.head_dim
        attention_weights = self.hidden_size * (2 * query_size + 2 * key_value_size)
        mlp_weights = 3 * self.hidden_size * self.intermediate_size
        weights = self.num_hidden_layers * (attention_weights + mlp_weights) + self.hidden_size * self.vocab_size
        return float(FORWARD_AND_BACKWARD * 2 * weights)

    @property
    def flops_per_attended_pair(self) -> float:
        """The attention term of `flops`, per pair of a query token and a key token it attends to."""
        return float(FORWARD_AND_BACKWARD * 4 * self.num_hidden_layers * self.num_attention_heads * self.head_dim)

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
