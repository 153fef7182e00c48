"""A transformers causal LM that scores packed micro-batches: log-probabilities and entropies of response tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from gcore_trainer import packed_attention
from gcore_trainer.errors import ConfigError, UnsupportedModelError
from gcore_trainer.packed_attention import PackedPlan
from gcore_trainer.packing import PackedBatch, pack
from gcore_trainer.types import MicroBatch

_SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """Of the N response tokens of a micro-batch, in the samples' order. All shape [N], in float32 at least."""

    log_probs: torch.Tensor
    entropies: torch.Tensor
    """Of the distribution each token was drawn from, in nats."""
    num_computed_tokens: int
    """Tokens that passed through the model."""


class PackedModel:
    """Scores samples with a causal LM, computing no padding and every shared prompt once.

    Args:
        model: loaded with ``attn_implementation=packed_attention.ATTENTION_NAME``; use `from_pretrained`.
        temperature: divides the logits, as it did at generation.
        share_prefix: compute equal prompts of a micro-batch once.

    Raises:
        UnsupportedModelError: the model has another attention implementation, or layers that are no such attention.
    """

    def __init__(self, model: Any, *, temperature: float = 1.0, share_prefix: bool = True) -> None:
        if not 0 < temperature < np.inf:
            raise ConfigError(f"temperature is {temperature}: a finite number above 0 is needed")
        # Any other attention ignores the plan that `score` hands it, and would let sequences see each other.
        if model.config._attn_implementation != packed_attention.ATTENTION_NAME:
            raise UnsupportedModelError(
                f"the model's attn_implementation is {model.config._attn_implementation!r}: "
                f"{packed_attention.ATTENTION_NAME!r} is needed; PackedModel.from_pretrained loads it so"
            )
        layer_types = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
        if unsupported := sorted(layer_types - _SUPPORTED_LAYER_TYPES):
            raise UnsupportedModelError(
                f"{model.config.model_type!r} has layers of type {', '.join(unsupported)}: packed training computes "
                f"{' and '.join(sorted(_SUPPORTED_LAYER_TYPES))} only"
            )
        self.model = model
        self.temperature = temperature
        self.share_prefix = share_prefix

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        temperature: float = 1.0,
        share_prefix: bool = True,
    ) -> Self:
        """Load a local Hugging Face folder.

        Raises:
            UnsupportedModelError: the model has layers that packed attention does not compute.
        """
        packed_attention.register()
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation=packed_attention.ATTENTION_NAME
        )
        return cls(model.to(device), temperature=temperature, share_prefix=share_prefix)

    def score(self, samples: MicroBatch, *, entropy_grad: bool = False) -> TokenScores:
        """Forward pass over one micro-batch; differentiable in `TokenScores.log_probs`.

        Args:
            entropy_grad: make the entropies differentiable too.

        Raises:
            BatchError: a sequence is longer than the model's sliding window.
            UnsupportedModelError: the model has layers that did not call packed attention.
        """
        batch = pack(samples, share_prefix=self.share_prefix)
        log_probs_UV = self._next_token_log_probs(batch)
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            entropies_U = -(log_probs_UV.exp() * log_probs_UV).sum(-1)
        return TokenScores(
            log_probs=_of_targets(log_probs_UV, batch),
            entropies=entropies_U[torch.from_numpy(batch.target_place).to(entropies_U.device)],
            num_computed_tokens=batch.input_ids.size,
        )

    @torch.no_grad()
    def log_probs(self, micro_batches: list[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """Log-probabilities [R] of each sample's response, without gradient."""
        results: list[list[NDArray[np.float32]]] = []
        for samples in micro_batches:
            batch = pack(samples, share_prefix=self.share_prefix)
            results.append(_split(_of_targets(self._next_token_log_probs(batch), batch), samples))
        return results

    def _next_token_log_probs(self, batch: PackedBatch) -> torch.Tensor:
        """Log-softmax of the tempered logits, shape [U, V]."""
        device = self.model.device
        plan = PackedPlan(batch, device=device, dtype=self.model.dtype)
        output = self.model(
            input_ids=torch.from_numpy(batch.input_ids).to(device)[None],
            position_ids=torch.from_numpy(batch.positions).to(device)[None],
            use_cache=False,
            logits_to_keep=torch.from_numpy(batch.predict_index).to(device),
            packed=plan,
        )
        # A layer that mixes tokens in another way would mix those of different sequences, without an error.
        num_layers = self.model.config.get_text_config().num_hidden_layers
        if plan.num_calls != num_layers:
            raise UnsupportedModelError(
                f"{plan.num_calls} of the {num_layers} layers of {self.model.config.model_type!r} called transformers' "
                "attention interface: packed training needs all of them to"
            )
        logits_UV = output.logits[0].to(torch.promote_types(output.logits.dtype, torch.float32))
        if self.temperature != 1.0:
            logits_UV = logits_UV / self.temperature
        return torch.log_softmax(logits_UV, dim=-1)


def _of_targets(log_probs_UV: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    place_N, target_N = (torch.from_numpy(x).to(log_probs_UV.device) for x in (batch.target_place, batch.target_ids))
    return log_probs_UV[place_N, target_N]


def _split(values_N: torch.Tensor, samples: MicroBatch) -> list[NDArray[np.float32]]:
    ends = np.cumsum([s.response_ids.size for s in samples])
    return np.split(values_N.cpu().numpy(), ends[:-1])
