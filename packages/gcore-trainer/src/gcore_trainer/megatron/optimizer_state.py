"""Main parameters and moments of Megatron-Core's distributed optimizer, as live boxes of Hugging Face tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from gcore_trainer.errors import StateError
from gcore_trainer.megatron.weights import Piece
from gcore_trainer.tensor_part import TensorPart

_GROUPS = ("model", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True, eq=False)
class _Shard:
    """The range of a flattened parameter that this data-parallel rank updates."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    main: torch.Tensor
    """[end - start] in float32: of the parameter itself, or of its float32 original."""
    moments: dict[str, Any]
    """Adam's, as the optimizer has them."""

    def tensor(self, group: str) -> torch.Tensor:
        return self.main.detach() if group == "model" else self.moments[group]


class OptimizerState:
    """The state of one trainer's optimizer. Moments exist from the start, so that they can be loaded in place.

    Args:
        optimizer: of ``get_megatron_optimizer``, with the distributed optimizer.
        chunks: the data-parallel modules whose parameters it updates.
        pieces: of each parameter.
    """

    def __init__(
        self, optimizer: Any, chunks: Sequence[Any], pieces: Mapping[torch.nn.Parameter, Sequence[Piece]]
    ) -> None:
        self._chunks = chunks
        self._pieces = pieces
        self._adams: list[torch.optim.Optimizer] = [part.optimizer for part in optimizer.chained_optimizers]
        self._shards = [shard for part in optimizer.chained_optimizers for shard in _shards(part)]
        self.set_step(0)

    def set_step(self, step: int) -> None:
        """Set Adam's count of updates."""
        for adam in self._adams:
            if isinstance(adam, torch.optim.AdamW):
                for moments in adam.state.values():
                    moments["step"] = torch.tensor(float(step), dtype=torch.float32)
            else:
                for group in adam.param_groups:
                    group["step"] = step

    def tensors(self) -> dict[str, dict[str, list[TensorPart]]]:
        """What this rank has of ``model``, ``exp_avg`` and ``exp_avg_sq``, under Hugging Face names."""
        return {group: self._parts(group) for group in _GROUPS}

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Sequence[TensorPart]]]) -> None:
        """Take over what `tensors` gave, or what was loaded in its place; then all ranks have all parameters.

        Raises:
            StateError: the boxes differ from this rank's.
        """
        own = self.tensors()
        for group in _GROUPS:
            for name, parts in own[group].items():
                _check_boxes(f"{group}[{name!r}]", state[group][name], parts)
        for group in _GROUPS:
            for name, parts in own[group].items():
                for part, given in zip(parts, state[group][name], strict=True):
                    part.tensor.copy_(given.tensor)
        for shard in self._shards:
            shard.parameter.data.view(-1)[shard.start : shard.end].copy_(shard.main)
        for chunk in self._chunks:
            chunk.start_param_sync(force_sync=True)

    def _parts(self, group: str) -> dict[str, list[TensorPart]]:
        parts: dict[str, list[TensorPart]] = {}
        for shard in self._shards:
            flat = shard.tensor(group)
            for whole in self._pieces[shard.parameter]:
                for piece in whole.within(shard.start, shard.end):
                    part = TensorPart(
                        global_shape=piece.global_shape, offset=piece.offset, tensor=piece.view(flat, shard.start)
                    )
                    parts.setdefault(piece.name, []).append(part)
        return parts


def _shards(part: Any) -> list[_Shard]:
    """Of one distributed optimizer."""
    result: list[_Shard] = []
    for parameters, mains in (
        (part.model_fp32_groups, part.shard_fp32_groups),
        (part.model_float16_groups, part.shard_fp32_from_float16_groups),
    ):
        for parameter, main in zip(chain(*parameters), chain(*mains), strict=True):
            buffer, dtype, bucket = part.model_param_gbuf_map[parameter]
            own = part.gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter]["param"]
            moments = part.optimizer.state[main]
            moments |= {"exp_avg": torch.zeros_like(main.detach()), "exp_avg_sq": torch.zeros_like(main.detach())}
            result.append(_Shard(parameter=parameter, start=own.start, end=own.end, main=main, moments=moments))
    return result


def _check_boxes(name: str, given: Sequence[TensorPart], own: Sequence[TensorPart]) -> None:
    boxes = [[(p.global_shape, p.offset, tuple(p.tensor.shape)) for p in parts] for parts in (given, own)]
    if boxes[0] != boxes[1]:
        raise StateError(f"{name} has parts {boxes[0]}: this rank has {boxes[1]} (global shape, offset, shape)")
