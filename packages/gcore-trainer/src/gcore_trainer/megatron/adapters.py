"""Low-rank adapters of Megatron-Core's linear layers: one for each Hugging Face layer that is fused into them."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch.nn.functional import linear

from gcore_trainer.config import ParallelConfig
from gcore_trainer.errors import ConfigError
from gcore_trainer.lora import A_OF, B_OF, check_start, initial_value, read_adapters
from gcore_trainer.lora_config import LoRAConfig
from gcore_trainer.megatron.architecture import Architecture
from gcore_trainer.megatron.model import HiddenStatesGPT
from gcore_trainer.megatron.pieces import TensorPiece, adapter_pieces

_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
Pieces = dict[torch.nn.Parameter, list[TensorPiece]]


def target_layers(architecture: Architecture, config: LoRAConfig) -> frozenset[str]:
    """Return the Hugging Face names of all layers that get an adapter; experts get none."""
    modules = _ATTENTION if architecture.num_experts else _ATTENTION + _MLP
    layers: list[str] = []
    for i in range(architecture.num_layers):
        layers += [f"model.layers.{i}.{module}" for module in modules]
    if config.target_modules == ("all-linear",):
        return frozenset(layers)
    targets: set[str] = set()
    for name in config.target_modules:
        matches = {layer for layer in layers if f".{layer}".endswith(f".{name}")}
        if not matches:
            accepted = ", ".join(module.partition(".")[2] for module in modules)
            raise ConfigError(
                f"target_modules is {config.target_modules}; expected all-linear alone or some of {accepted}: no layer "
                f"is named {name!r}"
            )
        targets |= matches
    return frozenset(targets)


def check_targets(
    targets: frozenset[str], architecture: Architecture, parallel: ParallelConfig
) -> None:
    """Raise `ConfigError` if adapted queries, keys and values of one group are divided among ranks."""
    tp = parallel.tensor_model_parallel_size
    groups = architecture.num_query_groups
    if tp > groups and any(name.endswith(_ATTENTION[:3]) for name in targets):
        raise ConfigError(
            f"tensor_model_parallel_size is {tp} with adapters of queries, keys or values; expected at most {groups}, "
            "the number of key-value heads, or other target_modules"
        )


def add_adapters(
    stages: Sequence[HiddenStatesGPT],
    pieces: Mapping[torch.nn.Parameter, Sequence[TensorPiece]],
    targets: frozenset[str],
    config: LoRAConfig,
) -> Pieces:
    """Add adapters to linear layers as `add_lora` does; return the pieces of their parameters, which alone learn."""
    adapters: Pieces = {}
    start = read_adapters(config)
    if config.path:
        # Shapes are compared where a rank takes its part.
        names = chain.from_iterable((layer + A_OF, layer + B_OF) for layer in targets)
        check_start(start, dict.fromkeys(names, ()), config)
    for stage in stages:
        stage.requires_grad_(requires_grad=False)
        if stage.pre_process:
            # A layer that is recomputed, or has no adapter, hands on a gradient only if its input needs one.
            stage.embedding.register_forward_hook(_require_grad)
        for name, module in list(stage.named_modules()):
            # A head that is the embedding has no weight of its own.
            if (
                not isinstance(module, ColumnParallelLinear | RowParallelLinear)
                or module.weight is None
            ):
                continue
            weight = pieces[module.weight]
            if not targets.isdisjoint(piece.name.removesuffix(".weight") for piece in weight):
                adapted = AdaptedLinear(module, weight, targets, config, start)
                stage.set_submodule(name, adapted)
                adapters |= adapted.pieces
    return adapters


class AdaptedLinear(torch.nn.Module):
    """A linear layer that computes W x + (alpha / rank) B A x, and is called as the layer that has W.

    B of a column parallel layer is divided by rows and A of a row parallel one by columns, as W is; the other is whole
    on every tensor-parallel rank.
    """

    def __init__(
        self,
        base: ColumnParallelLinear | RowParallelLinear,
        weight: Sequence[TensorPiece],
        targets: frozenset[str],
        config: LoRAConfig,
        start: Mapping[str, torch.Tensor],
    ) -> None:
        super().__init__()
        assert base.weight is not None
        self.base = base
        self.lora_A = torch.nn.ParameterList()
        self.lora_B = torch.nn.ParameterList()
        self.pieces: Pieces = {}
        """Pieces of the adapters' parameters."""
        self._config = config
        self._sequence_parallel: bool = base.sequence_parallel
        number_of: dict[str, int] = {}
        for layer, (piece_of_a, piece_of_b) in adapter_pieces(weight, config.rank).items():
            if layer not in targets:
                continue
            number_of[layer] = len(number_of)
            shapes = {p.name: p.global_shape for p in (piece_of_a, piece_of_b)}
            if start:
                check_start({name: start[name] for name in shapes}, shapes, config)
            a = _initial_parameter(piece_of_a, start, base.weight)
            b = _initial_parameter(piece_of_b, start, base.weight)
            divided, replicated = (a, b) if isinstance(base, RowParallelLinear) else (b, a)
            # Gradient norms count a divided parameter on every rank, and a replicated one on a single rank.
            divided.tensor_model_parallel = True  # pyright: ignore[reportAttributeAccessIssue]
            # With sequence parallelism each rank has a partial gradient; Megatron-Core sums them.
            replicated.sequence_parallel = self._sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
            self.lora_A.append(a)
            self.lora_B.append(b)
            self.pieces[a] = [piece_of_a]
            self.pieces[b] = [piece_of_b]
        self._blocks = [
            (number_of.get(piece.name.removesuffix(".weight")), piece.shape[0]) for piece in weight
        ]
        """Number of the adapter, if any, and number of rows of each block of the output."""

    def forward(self, input_T1I: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return output [T, 1, O] without the bias, and the bias, divided like the outputs of the base layer."""
        output_T1O, bias = self.base(input_T1I)
        hidden = (
            self._gather_hidden(linear(input_T1I, torch.cat(list(self.lora_A))))
            * self._config.scaling
        )
        parts = hidden.split(self._config.rank, dim=-1)
        updates = [linear(part, b) for part, b in zip(parts, self.lora_B, strict=True)]
        return output_T1O + self._join_updates(updates, output_T1O), bias

    def _gather_hidden(self, hidden_T1R: torch.Tensor) -> torch.Tensor:
        """Return the A x that B of this rank is applied to, from A x of this rank's part of x."""
        group: Any = self.base.tp_group
        if isinstance(self.base, RowParallelLinear):
            if self._sequence_parallel:
                return reduce_scatter_to_sequence_parallel_region(hidden_T1R, group=group)
            return reduce_from_tensor_model_parallel_region(hidden_T1R, group=group)
        if self._sequence_parallel:
            return gather_from_sequence_parallel_region(hidden_T1R, group=group)
        return copy_to_tensor_model_parallel_region(hidden_T1R, group=group)

    def _join_updates(
        self, updates: Sequence[torch.Tensor], output_T1O: torch.Tensor
    ) -> torch.Tensor:
        """Join the layers' rows in the order of the fused output, [T, 1, O]."""
        rows: list[Iterator[torch.Tensor]] = []
        for number, update in enumerate(updates):
            sizes = [num_rows for i, num_rows in self._blocks if i == number]
            rows.append(iter(update.split(sizes, dim=-1)))
        blocks: list[torch.Tensor] = []
        for number, num_rows in self._blocks:
            if number is None:
                blocks.append(output_T1O.new_zeros(()).expand(*output_T1O.shape[:-1], num_rows))
            else:
                blocks.append(next(rows[number]))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=-1)


def _initial_parameter(
    piece: TensorPiece, start: Mapping[str, torch.Tensor], weight: torch.Tensor
) -> torch.nn.Parameter:
    value = initial_value(piece.name, piece.global_shape, start)
    return torch.nn.Parameter(value[piece.box].to(weight).contiguous())


def _require_grad(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
    del module, inputs
    output.requires_grad_()
