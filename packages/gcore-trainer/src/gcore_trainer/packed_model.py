"""A transformers causal LM that scores packed micro-batches: log-probabilities and entropies of response tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from gcore_trainer import packed_attention
from gcore_trainer.errors import UnsupportedModelError
from gcore_trainer.packed_attention import PackedPlan
from gcore_trainer.packing import pack
from gcore_trainer.types import MicroBatch


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """Of the N response tokens of a micro-batch, in the samples' order. All shape [N], float32."""

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
    """

    def __init__(self, model: Any, *, temperature: float = 1.0, share_prefix: bool = True) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}: above 0 is needed")
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
            UnsupportedModelError: the architecture does not call transformers' attention interface.
        """
        packed_attention.register()
        config = AutoConfig.from_pretrained(path)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=dtype, attn_implementation=packed_attention.ATTENTION_NAME
            ).to(device)
        except ValueError as error:
            if "attention" not in str(error).lower():
                raise
            raise UnsupportedModelError(
                f"{config.model_type!r} does not use transformers' attention interface: packed training needs it"
            ) from error
        return cls(model, temperature=temperature, share_prefix=share_prefix)

    def score(self, samples: MicroBatch, *, entropy_grad: bool = False) -> TokenScores:
        """Forward pass over one micro-batch; differentiable in `TokenScores.log_probs`.

        Args:
            entropy_grad: make the entropies differentiable too.
        """
        batch = pack(samples, share_prefix=self.share_prefix)
        device, dtype = self.model.device, self.model.dtype
        output = self.model(
            input_ids=torch.from_numpy(batch.input_ids).to(device)[None],
            position_ids=torch.from_numpy(batch.positions).to(device)[None],
            use_cache=False,
            logits_to_keep=torch.from_numpy(batch.predict_index).to(device),
            packed=PackedPlan(batch, device=device, dtype=dtype),
        )
        logits_UV = output.logits[0].float()
        if self.temperature != 1.0:
            logits_UV = logits_UV / self.temperature
        log_probs_UV = torch.log_softmax(logits_UV, dim=-1)
        place_N = torch.from_numpy(batch.target_place).to(device)
        target_N = torch.from_numpy(batch.target_ids).to(device)
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            entropies_U = -(log_probs_UV.exp() * log_probs_UV).sum(-1)
        return TokenScores(
            log_probs=log_probs_UV[place_N, target_N],
            entropies=entropies_U[place_N],
            num_computed_tokens=batch.input_ids.size,
        )

    @torch.no_grad()
    def log_probs(self, micro_batches: list[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """Log-probabilities [R] of each sample's response, without gradient."""
        return [_split(self.score(samples).log_probs, samples) for samples in micro_batches]


def _split(values_N: torch.Tensor, samples: MicroBatch) -> list[NDArray[np.float32]]:
    ends = np.cumsum([s.response_ids.size for s in samples])
    return np.split(values_N.cpu().numpy(), ends[:-1])
