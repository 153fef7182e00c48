"""The torch backend: packed micro-batches and AdamW, in one process or sharded over many."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_trainer.config import OptimizerConfig
from gcore_trainer.errors import ConfigError
from gcore_trainer.lora import merge_lora
from gcore_trainer.losses.aggregation import BatchTotals
from gcore_trainer.objectives.objective import Objective
from gcore_trainer.packing.token_scores import named_scores
from gcore_trainer.packing.vision import checkpoint_name, copy_processor
from gcore_trainer.sample import NOTHING, MicroBatch
from gcore_trainer.torch.adamw import AdamW, whole
from gcore_trainer.torch.packed_transformer import PackedTransformer
from gcore_trainer.torch.parallel import TorchParallel
from gcore_trainer.training.base_trainer import add_sums
from gcore_trainer.training.replicas import Replicas
from gcore_trainer.training.trainer import Trainer


class TorchTrainer(Trainer):
    """Trains a `PackedModel` or `PackedValueModel`.

    Args:
        packed: the model; its parameters are updated in place.
        optimizer: see `OptimizerConfig`.
        objective: what is minimised.
        parallel: the ranks among which parameters and samples are divided; None: this process is alone.

    Raises:
        ConfigError: the objective needs another kind of model.
    """

    def __init__(
        self,
        packed: PackedTransformer[Any],
        *,
        optimizer: OptimizerConfig,
        objective: Objective[Any],
        parallel: TorchParallel | None = None,
    ) -> None:
        if objective.scores != packed.scores:
            raise ConfigError(
                f"objective is {type(objective).__name__}; expected one that reads {packed.scores}, which the model "
                f"gives, and not {objective.scores}"
            )
        self._packed = packed
        self._parallel = parallel
        if parallel is not None:
            parallel.shard(packed)
        names = [name for name, _ in packed.model.named_parameters()]
        self._hub_names = {n: n if packed.vision is None else checkpoint_name(packed.model, n) for n in names}
        """Names in a Hugging Face folder of transformers' parameters."""
        parameters = {self._hub_names[name]: p for name, p in packed.model.named_parameters() if p.requires_grad}
        self._adamw = AdamW(parameters, optimizer)
        super().__init__(
            config=optimizer,
            optimizer=self._adamw,
            objective=objective,
            replicas=parallel.replicas if parallel else Replicas(),
        )
        # Dropout would make every ratio to the sampling policy noise.
        packed.model.eval()

    @property
    def num_routers(self) -> int:
        return self._packed.num_routers

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        parameters = ((self._hub_names[name], whole(p.detach())) for name, p in self._packed.model.named_parameters())
        if self._packed.lora is None:
            yield from parameters
        else:
            adapters = {name: whole(p.detach()) for name, p in self._adamw.parameters.items()}
            yield from merge_lora(parameters, adapters, self._packed.lora)

    def save_pretrained(self, path: str | Path) -> None:
        model = self._packed.model
        if self._parallel is None and self._packed.lora is None:
            model.save_pretrained(path)
        else:
            weights = {name: tensor.cpu() for name, tensor in self.export_weights()}
            if self._parallel is not None and self._parallel.mesh.get_rank() != 0:
                return
            model.save_pretrained(path, state_dict=weights)
        if self._packed.vision is not None:
            copy_processor(Path(model.name_or_path), Path(path))

    def _backward(self, micro_batches: Sequence[MicroBatch], num_passes: int, totals: BatchTotals) -> dict[str, float]:
        self._adamw.zero_grad()
        sums: dict[str, torch.Tensor] = {}
        # FSDP averages over ranks; the parts of the loss are to be added.
        scale = self._parallel.world_size if self._parallel else 1
        tokens_before = self._packed.num_computed_tokens
        for i in range(num_passes):
            samples = micro_batches[i] if i < len(micro_batches) else None
            scores = self._packed.score(samples or NOTHING, entropy_grad=self._objective.entropy_grad)
            if samples is None:
                torch.autograd.backward(named_scores(scores).sum() * 0.0)
                continue
            loss, parts = self._objective.partial_loss(scores, samples, totals)
            torch.autograd.backward(loss * scale)
            add_sums(sums, parts)
        computed_tokens = self._packed.num_computed_tokens - tokens_before
        return {name: value.item() for name, value in sums.items()} | {"perf/computed_tokens": computed_tokens}

    def _predict(self, micro_batches: Sequence[MicroBatch], num_passes: int) -> list[NDArray[np.float32]]:
        return self._packed.predict(micro_batches, num_passes)

    def _recording_routing(self) -> AbstractContextManager[Sequence[list[NDArray[np.int16]]]]:
        return self._packed.recording_routing()
