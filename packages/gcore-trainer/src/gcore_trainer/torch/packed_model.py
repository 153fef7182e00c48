"""Packed models of the two kinds: a causal LM that scores tokens, and a classifier that gives values."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

from gcore_trainer.errors import ConfigError, UnsupportedModelError
from gcore_trainer.packing.token_scores import TokenScores, token_scores
from gcore_trainer.sample import MicroBatch, Sample, by_sample
from gcore_trainer.torch.logit_changes import logit_changes
from gcore_trainer.torch.packed_transformer import PackedTransformer


class PackedModel(PackedTransformer[TokenScores]):
    """A causal LM: log-probabilities and entropies of response tokens.

    Args:
        model: see `PackedTransformer`.
        temperature: divides the logits, as it did at generation.
        options: see `PackedTransformer`.
    """

    scores = "tokens"
    _auto_class = AutoModelForCausalLM
    _vision_class = AutoModelForImageTextToText

    def __init__(self, model: Any, *, temperature: float = 1.0, **options: Any) -> None:
        if not 0 < temperature < np.inf:
            raise ConfigError(f"temperature is {temperature}; expected a finite number above 0")
        self._logit_changes = logit_changes(model.config.get_text_config())
        self.temperature = temperature
        super().__init__(model, **options)

    def _alone(self, sample: Sample) -> torch.Tensor:
        input_ids, target_ids = _inputs(sample, self.model.device)
        logits_RV = self.model(input_ids=input_ids, use_cache=False).logits[0, -target_ids.numel() :]
        return (logits_RV.float() / self.temperature).log_softmax(-1).gather(1, target_ids[:, None])[:, 0]

    def score(self, samples: MicroBatch, *, entropy_grad: bool = False) -> TokenScores:
        log_probs_N, entropies_N = self._run(samples, entropy_grad=entropy_grad)
        return TokenScores(log_probs=log_probs_N, entropies=entropies_N)

    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """Compute log-probabilities [R] of each sample's response, without gradient."""
        return by_sample(self.predict(micro_batches), micro_batches)

    def _of_hidden(
        self, hidden_nD: torch.Tensor, target_ids: torch.Tensor, entropy_grad: bool
    ) -> tuple[torch.Tensor, ...]:
        head: Any = self.model.get_output_embeddings()
        scores = token_scores(
            hidden_nD,
            head.weight.to(hidden_nD.dtype),
            target_ids,
            bias_V=getattr(head, "bias", None),
            temperature=self.temperature,
            logit_scale=self._logit_changes.scale,
            softcap=self._logit_changes.softcap,
            entropy_grad=entropy_grad,
        )
        return scores.log_probs, scores.entropies


class PackedValueModel(PackedTransformer[torch.Tensor]):
    """A sequence classifier of one label, as a critic or reward model: a value for every token's place.

    It is transformers' ``...ForSequenceClassification`` with ``num_labels=1``; a causal LM's folder loads with a head
    of zeros, so that a new critic's values start at 0.
    """

    scores = "values"
    _auto_class = AutoModelForSequenceClassification
    _new_weights = ("score.",)

    @classmethod
    def _load_options(cls) -> dict[str, Any]:
        return {"num_labels": 1}

    def _check_head(self, model: Any) -> None:
        if not isinstance(getattr(model, "score", None), torch.nn.Linear):
            raise UnsupportedModelError(
                f"{type(model).__name__} has no linear layer 'score' as its head: packed training computes no other"
            )

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Any) -> Self:
        packed = super().from_pretrained(path, **options)
        if not _is_classifier(path):
            torch.nn.init.zeros_(packed.model.score.weight)
        return packed

    def score(self, samples: MicroBatch, *, entropy_grad: bool = False) -> torch.Tensor:
        """Compute values [N] of the states before each response token, in float32 at least."""
        del entropy_grad
        (values_N,) = self._run(samples)
        return values_N

    def _probe(self, max_length: int | None) -> None:
        # The head of a new critic is zeros, and would hide every difference.
        weight: torch.Tensor = self.model.score.weight.data
        own = weight.clone()
        weight.copy_(torch.arange(weight.numel()).sin().reshape(weight.shape) * weight.shape[-1] ** -0.5)
        try:
            super()._probe(max_length)
        finally:
            weight.copy_(own)

    def _alone(self, sample: Sample) -> torch.Tensor:
        input_ids, target_ids = _inputs(sample, self.model.device)
        values: list[torch.Tensor] = []
        hook = self.model.score.register_forward_hook(lambda *call: values.append(call[-1]))
        try:
            last_11 = self.model(input_ids=input_ids, use_cache=False).logits
        finally:
            hook.remove()
        # transformers returns the last token's value only.
        return torch.cat([values[0][0, -target_ids.numel() : -1, 0], last_11[0]])

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """Compute values [R] of the states before each sample's response tokens, without gradient."""
        return by_sample(self.predict(micro_batches), micro_batches)

    def _of_hidden(
        self, hidden_nD: torch.Tensor, target_ids: torch.Tensor, entropy_grad: bool
    ) -> tuple[torch.Tensor, ...]:
        del target_ids, entropy_grad
        return (self.model.score(hidden_nD).sum(-1),)


def _inputs(sample: Sample, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Input tokens [1, P + R - 1] and targets [R]."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).to(device)
    return ids[None, :-1], ids[sample.prompt_ids.size :]


def _is_classifier(path: str | Path) -> bool:
    architectures = json.loads((Path(path) / "config.json").read_text()).get("architectures") or []
    return any(name.endswith("ForSequenceClassification") for name in architectures)
