"""Checked numbers, distributions of token lengths, and the FLOPs of a transformer over them.

The functions `check_*` raise PlacementError, which names the field.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from statistics import NormalDist
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gcore_placement.errors import PlacementError, refusal
from gcore_placement.workload.config_keys import LATENT_FIELDS, workload_fields

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


def check_known(field: str, value: object, choices: Iterable[object]) -> None:
    """Check that `value` is one of the choices."""
    choices = list(choices)
    if value not in choices:
        raise refusal(field, value, f"one of {', '.join(map(str, choices))}")


def check_positive(field: str, value: object) -> None:
    """Check that `value` is an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise refusal(field, value, "an integer of at least 1")


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int | np.number) and not isinstance(value, bool)


def check_above_0(field: str, value: Any) -> None:
    """Check that `value` is a finite number above 0."""
    if not _is_number(value) or not 0 < float(value) < np.inf:
        raise refusal(field, value, "a finite number above 0")


def check_share(field: str, value: float) -> None:
    """Check that `value` is a number above 0 and at most 1."""
    check_above_0(field, value)
    if value > 1:
        raise refusal(field, value, "a number above 0, at most 1")


def check_amount(field: str, value: Any) -> None:
    """Check that `value` is a finite number of at least 0."""
    if not _is_number(value) or not 0 <= float(value) < np.inf:
        raise refusal(field, value, "a finite number of at least 0")


def check_amounts(field: str, values: ArrayLike) -> Floats:
    """Return finite numbers of at least 0 as float64 of the same shape; an error names the first wrong index."""
    try:
        amounts = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise PlacementError(
            f"{field} is {values!r}; expected an array of numbers ({error})"
        ) from error
    wrong = ~np.isfinite(amounts) | (amounts < 0)
    if wrong.any():
        index = np.unravel_index(int(wrong.argmax()), amounts.shape)
        if index:
            field = f"{field}[{', '.join(str(int(axis)) for axis in index)}]"
        raise refusal(field, float(amounts[index]), "a finite number of at least 0")
    return amounts


def check_amount_list(field: str, values: ArrayLike) -> Floats:
    """Return the numbers of `check_amounts` as float64 [num_items]."""
    amounts = check_amounts(field, values)
    if amounts.ndim != 1:
        raise refusal(f"{field}.ndim", amounts.ndim, "1 (one number per item)")
    return amounts


def check_lengths(field: str, values: ArrayLike) -> Floats:
    """Return whole numbers of tokens as float64 of the same shape."""
    lengths = check_amounts(field, values)
    fractions = lengths != np.floor(lengths)
    if fractions.any():
        raise refusal(field, float(lengths[fractions].flat[0]), "whole numbers of tokens")
    return lengths


Positive = Annotated[int, check_positive]
Above0 = Annotated[float, check_above_0]
Share = Annotated[float, check_share]
Amount = Annotated[float, check_amount]


class CheckedQuantities:
    """A dataclass that checks each field of type `Positive`, `Above0`, `Share` or `Amount`."""

    def __post_init__(self) -> None:
        for name, check in _checks(type(self)):
            check(name, getattr(self, name))


@cache
def _checks(dataclass_type: Any) -> list[tuple[str, Callable[[str, Any], object]]]:
    checks: list[tuple[str, Callable[[str, Any], object]]] = []
    for field in fields(dataclass_type):
        checks.extend((field.name, check) for check in getattr(field.type, "__metadata__", ()))
    return checks


_EDGES = np.concatenate([np.linspace(0, 1, 513)[:-1], 1 - 2.0 ** -np.arange(10, 42), [1.0]])
"""Edges of the ranges of probability that the values of a law stand for, finer in the long tail."""
_MIDDLES = (_EDGES[1:] + _EDGES[:-1]) / 2


def normal_quantiles(probabilities: Floats) -> Floats:
    """Return the quantiles of a standard normal variable, of the shape of the probabilities."""
    return np.vectorize(NormalDist().inv_cdf, otypes=[np.float64])(probabilities)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Lengths:
    """A distribution over tokens, as rising values and their weights; use `log_normal` or `recorded`.

    Example:
        >>> lengths = Lengths.log_normal(median=1000, sigma=1.0, longest=8192)
        >>> lengths
        Lengths(mean=1571.4, longest=8192)
        >>> round(lengths.expected_longest(64))
        7680
        >>> Lengths.recorded([100, 300, 800]).mean
        400.0
    """

    values: Floats
    """[num_values], rising."""
    edges: Floats
    """[num_values + 1]: value i stands for probabilities from edge i to edge i + 1."""

    @classmethod
    def log_normal(cls, *, median: float, sigma: float, longest: float) -> Self:
        """Return log-normal lengths cut at `longest` (at least `median`); sigma: deviation of their logarithm."""
        check_above_0("median", median)
        check_above_0("longest", longest)
        check_amounts("sigma", sigma)
        if median > longest:
            raise refusal("median", median, f"at most longest ({longest})")
        with np.errstate(over="ignore"):  # infinite ones are cut too
            values = median * np.exp(sigma * normal_quantiles(_MIDDLES))
        return cls(values=np.clip(values, 1, longest), edges=_EDGES)

    @classmethod
    def recorded(cls, lengths: ArrayLike) -> Self:
        """Return the distribution of recorded lengths, at least one."""
        values = np.sort(check_amount_list("lengths", lengths))
        if not values.size:
            raise refusal("lengths", [], "at least one length")
        return cls(values=values, edges=np.linspace(0, 1, values.size + 1))

    def __repr__(self) -> str:
        return f"Lengths(mean={self.mean:.1f}, longest={self.longest:.0f})"

    @property
    def mean(self) -> float:
        return float(np.diff(self.edges) @ self.values)

    @property
    def mean_square(self) -> float:
        return float(np.diff(self.edges) @ self.values**2)

    @property
    def longest(self) -> float:
        return float(self.values[-1])

    def expected_longest(self, count: float) -> float:
        """Return the mean of the longest of ``count`` draws."""
        return float(self.values @ np.diff(self.edges ** max(1.0, count)))

    def cut(self, longest: float) -> "Lengths":
        """Return the lengths cut at `longest`."""
        return Lengths(values=np.minimum(self.values, longest), edges=self.edges)

    def remaining(self) -> "Lengths":
        """Return the remaining lengths of sequences at a random moment of steady work.

        Their density is (1 - F) / mean (the renewal equation's residual life). Only its values' grid is coarser.
        """
        rising = np.concatenate([[0.0], self.values])
        cumulated = np.concatenate([[0.0], np.cumsum(np.diff(rising) * (1 - self.edges[:-1]))])
        return Lengths(values=np.interp(_MIDDLES, cumulated / cumulated[-1], rising), edges=_EDGES)

    def most_alive(self, offset: float) -> float:
        """Return the most tokens per sequence at any moment if all start together; offset: tokens of the prompt."""
        return float(np.max((1 - self.edges[:-1]) * (offset + self.values)))


def lengths_of(mean: float, longest: float, *, count: float) -> Lengths:
    """Return log-normal lengths of this mean; the longest of `count` of them is about `longest`."""
    mean = max(1.0, mean)
    longest = max(1.0, longest)
    deviations = NormalDist().inv_cdf(1 - 1 / (count + 1)) if count > 1 else 0.0
    # ln(longest / mean) = sigma * deviations - sigma^2 / 2
    sigma = deviations - math.sqrt(max(0.0, deviations**2 - 2 * math.log(max(1.0, longest / mean))))
    return Lengths.log_normal(
        median=min(mean * math.exp(-(sigma**2) / 2), longest), sigma=sigma, longest=longest
    )


FORWARD_AND_BACKWARD = 3
"""A backward pass multiplies each matrix twice, for the gradients of its input and of its weight."""
_TILE_ROWS = 128
_MOE_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_moe_layers")
_OPTIONAL_FIELDS = ("n_shared_experts", "q_lora_rank")


@dataclass(frozen=True, kw_only=True)
class TransformerWorkload:
    """The shape of a decoder with gated MLPs and full causal attention.

    Dense (Llama, Mistral, Qwen2, Qwen3), or with a mixture of experts in the place of some MLPs (Mixtral, Qwen3-MoE,
    DeepSeek-V3); attention with grouped queries, or latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1),
    which keeps one compressed state of a token for all heads. Fields carry their Hugging Face names; every one is an
    integer of at least 1, but for those of the mixture and of latent attention, which other models leave at 0;
    num_key_value_heads divides num_attention_heads.

    Example:
        >>> workload = TransformerWorkload(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        ...     num_attention_heads=28, num_key_value_heads=4, head_dim=128, vocab_size=152064)
        >>> short, long = workload.flops([1024, 32768])
        >>> print(f"{short / 1024:.2e} and {long / 32768:.2e} FLOPs per token")
        4.30e+10 and 6.22e+10 FLOPs per token
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
    """Experts of a mixture that compute each token, in addition to the chosen ones."""
    kv_lora_rank: int = 0
    """Width of the compressed state of keys and values of all heads: latent attention."""
    q_lora_rank: int = 0
    """Width of the compressed state of queries; 0: they are computed from the hidden state."""
    qk_nope_head_dim: int = 0
    """Part of a key that is made from the compressed state, without rotary embedding."""
    qk_rope_head_dim: int = 0
    """Part of a key with rotary embedding, shared by all heads; cached in addition to the compressed state."""
    v_head_dim: int = 0

    def __post_init__(self) -> None:
        values = vars(self)
        unused: set[str] = set()
        for group in (_MOE_FIELDS, LATENT_FIELDS):
            if not any(values[name] for name in group):
                unused.update(group)
        for name, value in values.items():
            is_left_out = name in _OPTIONAL_FIELDS and not value
            if name not in unused and not is_left_out:
                check_positive(name, value)
        for name, needed in (("n_shared_experts", "num_experts"), ("q_lora_rank", "kv_lora_rank")):
            if needed in unused and values[name]:
                raise refusal(name, values[name], f"0 without {needed}")
        for name, bound in (
            ("num_moe_layers", "num_hidden_layers"),
            ("num_experts_per_tok", "num_experts"),
        ):
            if values[name] > values[bound]:
                raise refusal(name, values[name], f"at most {bound} ({values[bound]})")
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
        return cls(**workload_fields(config))

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
        """Width of the outputs of all attention heads together."""
        if self.is_latent:
            return self.num_attention_heads * self.v_head_dim
        return self.query_size

    @property
    def key_value_size(self) -> int:
        """Width of the keys and values of all their heads together, as attention multiplies them."""
        if self.is_latent:
            return self.query_size + self.value_size
        return 2 * self.num_key_value_heads * self.head_dim

    @property
    def cached_size(self) -> int:
        """Numbers of a token in a layer's cache: keys and values, or the compressed state."""
        if self.is_latent:
            return self.kv_lora_rank + self.qk_rope_head_dim
        return self.key_value_size

    @property
    def num_cached_heads(self) -> int:
        """Parts into which ranks can divide the cache of a token."""
        return 1 if self.is_latent else self.num_key_value_heads

    @property
    def attention_matrices(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the matrices of a layer's attention."""
        h = self.hidden_size
        if not self.is_latent:
            key_size = self.key_value_size // 2
            return [(h, self.query_size), (h, key_size), (h, key_size), (self.value_size, h)]
        queries = [(h, self.query_size)]
        if self.q_lora_rank:
            queries = [(h, self.q_lora_rank), (self.q_lora_rank, self.query_size)]
        keys_and_values = self.num_attention_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return [
            *queries,
            (h, self.cached_size),
            (self.kv_lora_rank, keys_and_values),
            (self.value_size, h),
        ]

    @property
    def num_attention_weights(self) -> int:
        """Weights of a layer's attention."""
        return sum(inputs * outputs for inputs, outputs in self.attention_matrices)

    @property
    def shared_experts_size(self) -> int:
        """Width of all shared experts of a layer together."""
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
        """FLOPs of the chosen experts, a part of `flops_per_token`; 0 without a mixture."""
        width = self.num_experts_per_tok * self.moe_intermediate_size
        return float(FORWARD_AND_BACKWARD * 2 * self.num_moe_layers * 3 * self.hidden_size * width)

    def expert_tiles(self, tokens: Floats) -> Floats:
        """Return the ratio of computed rows to given rows of an expert, if `tokens` reach all experts together.

        A product of matrices computes whole tiles of 128 rows: for M rows (M + 64) / M times as many on average.
        """
        if not self.num_experts:
            return np.ones_like(tokens)
        return 1 + _TILE_ROWS / 2 / (tokens * self.num_experts_per_tok / self.num_experts)

    @property
    def flops_per_attended_pair(self) -> float:
        """The attention term of `flops`, per pair of a query token and a key token it attends to."""
        return float(
            FORWARD_AND_BACKWARD * 2 * self.num_hidden_layers * (self.query_size + self.value_size)
        )

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
        return np.asarray(
            self.flops_per_token * tokens + self.flops_per_attended_pair * pairs, dtype=np.float64
        )


def gigabytes(size_bytes: float) -> str:
    """Return a size as text."""
    return f"{size_bytes / 1e9:.1f} GB"
