"""Log-probabilities of tokens by a fused kernel of cut-cross-entropy (Wijmans et al., arXiv:2411.09009), on CUDA.

The kernel computes the log-sum-exp of logits that it never writes to memory, in float32. The rest of the library is not
used, because release 25.1.1 rounds a target's products and the sums of gradients to half precision.
Passes with a gradient, and those that need entropies, are `token_scores`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from math import frexp
from typing import Any, Self

import torch

from gcore_trainer.errors import ConfigError, MissingExtraError

LogSumExp = Callable[..., torch.Tensor]
"""Gets ``e`` [N, D], ``c`` [V, D] and ``softcap``; returns the log-sum-exp [N] of cap(e @ c^T), in float32."""


@dataclass(frozen=True, kw_only=True)
class FusedHead:
    """Scores targets under softmax(cap(logit_scale * (hidden @ weight^T)) / temperature), without entropies.

    Hidden states are multiplied by the scale and the inverse temperature before the product. In half precision that is
    exact for powers of 2 alone.

    Raises:
        ConfigError: a bias, or a type, temperature, scale or soft cap that gives other results than `token_scores`.
        MissingExtraError: cut-cross-entropy is not installed.
    """

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    dtype: torch.dtype
    """Type of the hidden states, and of the head."""
    has_bias: bool = False
    kernel: LogSumExp | None = None
    """Computes the log-sum-exp; None: the library's."""

    def __post_init__(self) -> None:
        is_half = self.dtype in (torch.float16, torch.bfloat16)
        if self.dtype not in _TYPES:
            raise ConfigError(f"dtype is {_word(self.dtype)} with fused_head; expected {', '.join(map(_word, _TYPES))}")
        if self.softcap is not None and self.temperature != 1:
            raise ConfigError(
                f"temperature is {self.temperature} with fused_head and a soft cap of {self.softcap}; expected 1.0, "
                "because the kernel divides no capped logits, or fused_head false"
            )
        for name, value in (("temperature", self.temperature), ("logit_scale", self.logit_scale)):
            if is_half and frexp(value)[0] != 0.5:
                raise ConfigError(
                    f"{name} is {value} with fused_head in {_word(self.dtype)}; expected a power of 2, for which "
                    "hidden states are scaled without rounding, dtype float32, or fused_head false"
                )
        if self.has_bias:
            raise ConfigError("fused_head is true, and the model's head has a bias; expected false, or one without")
        if self.kernel is None:
            object.__setattr__(self, "kernel", fused_kernel())

    @classmethod
    def of(cls, model: Any, placed: Any, **settings: Any) -> Self:
        """Return the head of a transformers model whose parameters will be on ``placed.device``.

        Raises:
            ConfigError: that is no CUDA device; and as of the class.
        """
        if placed.device.type != "cuda":
            raise ConfigError(f"fused_head is true on device {str(placed.device)!r}; expected false, or a CUDA device")
        return cls(has_bias=getattr(model.get_output_embeddings(), "bias", None) is not None, **settings)

    @torch.no_grad()
    def log_probs(self, hidden_ND: torch.Tensor, weight_VD: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
        """Compute the targets' log-probabilities [N] in float32, without gradient."""
        if not targets_N.numel():
            return hidden_ND.new_zeros(0, dtype=torch.float32)
        assert self.kernel is not None
        factor = self.logit_scale / self.temperature
        scaled_ND = (hidden_ND if factor == 1 else hidden_ND * factor).contiguous()
        narrow_VD = weight_VD.to(hidden_ND.dtype)
        log_sums_N = self.kernel(e=scaled_ND, c=narrow_VD, softcap=self.softcap)
        parts = zip(scaled_ND.split(_ROWS), targets_N.split(_ROWS), strict=True)
        logits_N = torch.cat([_dots(hidden_CD, narrow_VD, targets_C) for hidden_CD, targets_C in parts])
        if self.softcap is not None:
            logits_N = torch.tanh(logits_N / self.softcap) * self.softcap
        return logits_N - log_sums_N


_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_ROWS = 4096
"""Targets whose rows of the head are in memory at a time."""


def fused_kernel() -> LogSumExp:
    """Import the library's kernel; raise `MissingExtraError` if it is not installed."""
    try:
        return import_module("cut_cross_entropy.cce_lse_forward").cce_lse_forward_kernel
    except ImportError:
        raise MissingExtraError("cut_cross_entropy", "fused", "fused_head is true") from None


def _dots(hidden_CD: torch.Tensor, weight_VD: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
    """Compute the targets' logits [C]: products and sums are in float32."""
    return (hidden_CD.float() * weight_VD[targets_C].float()).sum(-1)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
