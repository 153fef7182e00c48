"""Megatron-Core's distributed AdamW, whose state is live boxes of Hugging Face tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import (
    OptimizerConfig as MegatronOptimizerConfig,
    get_megatron_optimizer,
)
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from gcore_trainer.config import OptimizerConfig, require
from gcore_trainer.errors import StateError
from gcore_trainer.megatron.cpu import megatron_runtime
from gcore_trainer.megatron.pieces import TensorPiece
from gcore_trainer.torch.optimizer import AdamW, Read

_GROUPS = ("model", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorPart:
    """A box of a global tensor, of which a rank may have several."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """First index of the box in each dimension; its extents are those of ``tensor``."""
    tensor: torch.Tensor
    """A view of the live data."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Shard:
    """The range of a flattened parameter that this data-parallel rank updates."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    main: torch.Tensor
    """[end - start] in float32: of the parameter itself, or of its float32 original."""
    moments: dict[str, Any]
    """Adam's moments, as the optimizer has them."""

    def range_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of this range of a tensor of the parameter's shape."""
        return tensor.view(-1)[self.start : self.end]


class DistributedAdamW(AdamW):
    """The optimizer of one trainer. Moments exist from the start, so that they can be loaded in place.

    With ``offload`` originals and moments are in host memory, and `AdamW` updates them there. A trained bfloat16
    parameter then takes 6 bytes on the device, weight and gradient, and 16 / D bytes on the host of each of the D ranks
    that share its moments. Megatron-Core's own offloading keeps the originals on the device, too: 4 / D bytes more.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        chunks: Sequence[DistributedDataParallel],
        pieces: Mapping[torch.nn.Parameter, Sequence[TensorPiece]],
        *,
        dtype: torch.dtype,
        device: torch.device,
        offload: bool = False,
    ) -> None:
        self._grad_clip = config.grad_clip
        require(
            "name",
            config.name,
            config.name == "adamw",
            "'adamw' for the megatron backend, or the torch backend",
        )
        self._chunks = chunks
        self._pieces = pieces
        self._device = device
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=0.0,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=True,
        )
        # No overrides: without them norms and biases would not decay, as they do in the torch backend.
        self._megatron: Any = get_megatron_optimizer(
            settings, list(chunks), config_overrides={}, use_gloo_process_groups=False
        )
        self._shards: list[_Shard] = []
        for part in self._megatron.chained_optimizers:
            self._shards += _shards(part)
        if offload and self._shards:
            self._move_shards(config)
        else:
            for shard in self._shards:
                for key in _GROUPS[1:]:
                    shard.moments[key] = torch.zeros_like(shard.main.detach())
        self._set_step(0)

    def _move_shards(self, config: OptimizerConfig) -> None:
        """Make originals and moments in host memory, and free the originals on the device."""
        parameters: dict[str, torch.nn.Parameter] = {}
        for number, shard in enumerate(self._shards):
            parameter: Any = shard.parameter
            view = torch.nn.Parameter(shard.range_of(parameter.data))
            view.grad_dtype = torch.float32
            view.grad = shard.range_of(parameter.main_grad)
            parameters[str(number)] = view
            if shard.main.dtype != parameter.dtype:
                # Megatron-Core computes the norm of its gradients, and needs no values.
                shard.main.untyped_storage().resize_(0)
        super().__init__(parameters, config, offload=True)
        for number, shard in enumerate(self._shards):
            main = self._masters[str(number)]
            self._shards[number] = replace(shard, main=main, moments=self._optimizer.state[main])

    def update(self, lr: float) -> float:
        with megatron_runtime(self._device):
            self._megatron.prepare_grads()
            grad_norm = float(self._megatron.get_grad_norm())
            if not np.isfinite(grad_norm):
                return grad_norm
            for part in self._megatron.chained_optimizers:
                clip_grad_by_total_norm_fp32(part.get_parameters(), self._grad_clip, grad_norm)
            if self.is_offloaded:
                self._step(lr)
                for chunk in self._chunks:
                    # Otherwise the next forward pass gathers them.
                    if not chunk.ddp_config.overlap_param_gather:
                        chunk.start_param_sync()
                return grad_norm
            for group in self._megatron.param_groups:
                group["lr"] = lr
            self._megatron.step_with_ready_grads()
        self.num_updates += 1
        return grad_norm

    def tensors(self, read: Read = torch.Tensor.detach) -> dict[str, dict[str, Any]]:
        return {group: self._parts(group, read) for group in _GROUPS}

    def stored_tensors(self) -> dict[str, dict[str, Any]]:
        """Return the shards and their moments by number; shards of float32 parameters are views of the parameters."""
        if self.is_offloaded:
            return super().stored_tensors()
        groups: dict[str, dict[str, Any]] = {group: {} for group in _GROUPS}
        for number, shard in enumerate(self._shards):
            for group in _GROUPS:
                groups[group][str(number)] = (
                    shard.main if group == "model" else shard.moments[group]
                )
        return groups

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Take over the tensors of a state and its ``optimizer_step``; afterwards all ranks have all parameters."""
        pairs: list[tuple[TensorPart, TensorPart]] = []
        for group, tensors in self.tensors().items():
            for name, parts in tensors.items():
                sources = state[group][name]
                boxes = _boxes(parts)
                if _boxes(sources) != boxes:
                    raise StateError(
                        f"{group}[{name!r}] has parts {_boxes(sources)}; expected this rank's, {boxes} "
                        "(global shape, offset, shape)"
                    )
                pairs += zip(parts, sources, strict=True)
        for part, source in pairs:
            part.tensor.copy_(source.tensor)
        for shard in self._shards:
            shard.range_of(shard.parameter.data).copy_(shard.main)
        with megatron_runtime(self._device):
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)
        self._set_step(state["optimizer_step"])

    def _set_step(self, step: int) -> None:
        self.num_updates = step
        for part in self._megatron.chained_optimizers:
            adam = part.optimizer
            if self.is_offloaded or isinstance(adam, torch.optim.AdamW):
                for shard in self._shards:
                    shard.moments["step"] = torch.tensor(float(step), dtype=torch.float32)
            else:
                for group in adam.param_groups:
                    group["step"] = step

    def _parts(self, group: str, read: Read) -> dict[str, list[TensorPart]]:
        parts: dict[str, list[TensorPart]] = {}
        for shard in self._shards:
            flat = read(shard.main if group == "model" else shard.moments[group])
            for parameter_piece in self._pieces[shard.parameter]:
                for piece in parameter_piece.split_range(shard.start, shard.end):
                    tensor = piece.view(flat, shard.start)
                    part = TensorPart(
                        global_shape=piece.global_shape, offset=piece.offset, tensor=tensor
                    )
                    parts.setdefault(piece.name, []).append(part)
        return parts


def _boxes(parts: Sequence[TensorPart]) -> list[tuple[tuple[int, ...], ...]]:
    """Return global shape, offset and shape of each part."""
    return [(part.global_shape, part.offset, tuple(part.tensor.shape)) for part in parts]


def _shards(part: Any) -> list[_Shard]:
    """Return the shards of one distributed optimizer."""
    result: list[_Shard] = []
    for parameters, mains in (
        (part.model_fp32_groups, part.shard_fp32_groups),
        (part.model_float16_groups, part.shard_fp32_from_float16_groups),
    ):
        for parameter, main in zip(
            chain.from_iterable(parameters), chain.from_iterable(mains), strict=True
        ):
            buffer, dtype, bucket = part.model_param_gbuf_map[parameter]
            span = part.gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter]["param"]
            result.append(
                _Shard(
                    parameter=parameter,
                    start=span.start,
                    end=span.end,
                    main=main,
                    moments=part.optimizer.state[main],
                )
            )
    return result
