"""A packed sequence classifier, as a critic or a reward model."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForSequenceClassification

from gcore_trainer.errors import UnsupportedModelError
from gcore_trainer.packing.row import Row
from gcore_trainer.sample import MicroBatch, Sample, by_sample
from gcore_trainer.torch.host_memory import local
from gcore_trainer.torch.loading import input_and_target_ids
from gcore_trainer.torch.packed_model import PackedTransformer


class PackedValueModel(PackedTransformer[torch.Tensor]):
    """A sequence classifier of one label, as a critic or reward model: a value for every token.

    It is transformers' ``...ForSequenceClassification`` with ``num_labels=1``; a causal LM's folder loads with a head
    of zeros, so that a new critic's values start at 0.

    Example:
        >>> critic = PackedValueModel.from_pretrained("model")
        >>> sample = Sample(prompt_ids=np.array([1, 5]), response_ids=np.array([8, 9, 2]))
        >>> values = critic.values([[sample]])
        >>> values[0][0].tolist()
        [0.0, 0.0, 0.0]
    """

    scores = "values"
    auto_class = AutoModelForSequenceClassification
    new_weights = ("score.",)
    load_options: ClassVar[dict[str, Any]] = {"num_labels": 1}

    def __init__(self, model: Any, **options: Any) -> None:
        if not isinstance(getattr(model, "score", None), torch.nn.Linear):
            raise UnsupportedModelError(
                f"{type(model).__name__} has no linear layer 'score' as its head: packed training computes no other"
            )
        super().__init__(model, **options)

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Any) -> Self:
        packed = super().from_pretrained(path, **options)
        architectures = (
            json.loads((Path(path) / "config.json").read_text()).get("architectures") or []
        )
        is_classifier = any(name.endswith("ForSequenceClassification") for name in architectures)
        if not is_classifier and (packed.lora is None or not packed.lora.path):
            torch.nn.init.zeros_(packed.model.score.weight)
        return packed

    def _probe(self) -> None:
        # The head of a new critic is zeros, and would hide every difference.
        # Of a sharded one, one rank has the row, and the others have none.
        weight = local(self.model.score.weight.data)
        saved = weight.clone()
        size = weight.shape[-1]
        weight.copy_((torch.arange(size).sin() * size**-0.5).expand(weight.shape))
        try:
            super()._probe()
        finally:
            weight.copy_(saved)

    def alone(self, sample: Sample) -> torch.Tensor:
        input_ids, target_ids = input_and_target_ids(sample, self.model.device)
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
        self, hidden_nD: torch.Tensor, row: Row, entropy_grad: bool | None
    ) -> tuple[torch.Tensor, ...]:
        del row, entropy_grad
        return (self.model.score(hidden_nD).sum(-1),)
