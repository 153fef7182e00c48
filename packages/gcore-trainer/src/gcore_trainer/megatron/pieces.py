"""The places of Megatron-Core's parameters in the Hugging Face model: one map for loading, export and state.

A parameter is made of pieces. Each is a box of one Hugging Face tensor, and contiguous in the parameter.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from gcore_trainer.config import ParallelConfig
from gcore_trainer.lora import A_OF, B_OF
from gcore_trainer.megatron.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class TensorPiece:
    """A box of a Hugging Face tensor."""

    name: str
    """As in ``named_parameters()`` of transformers' model."""
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """First index of the box in each dimension."""
    shape: tuple[int, ...]
    """Extents of the box; row-major in the parameter."""
    start: int
    """First element in the flattened parameter."""

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def box(self) -> tuple[slice, ...]:
        """Index of the box in the tensor."""
        return tuple(slice(o, o + s) for o, s in zip(self.offset, self.shape, strict=True))

    def view(self, flat: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Return the box, as a view."""
        return flat[self.start - first : self.start - first + self.size].view(self.shape)

    def split_range(self, start: int, end: int) -> "Iterator[TensorPiece]":
        """Yield the parts of this piece in a range of the flattened parameter, as up to three pieces."""
        start = max(start, self.start) - self.start
        end = min(end, self.start + self.size) - self.start
        columns = self.shape[-1]
        while start < end:
            row, column = divmod(start, columns)
            num_rows = 1
            width = min(columns - column, end - start)
            if width == columns:
                num_rows = (end - start) // columns
            yield self._box(row, column, num_rows, width)
            start += num_rows * width

    def _box(self, row: int, column: int, num_rows: int, width: int) -> "TensorPiece":
        start = self.start + row * self.shape[-1] + column
        if len(self.shape) == 1:
            return replace(self, offset=(self.offset[0] + column,), shape=(width,), start=start)
        *leading, rows, columns = self.offset
        return replace(
            self,
            offset=(*leading, rows + row, columns + column),
            shape=(*self.shape[:-2], num_rows, width),
            start=start,
        )


def pieces_of(
    architecture: Architecture, parallel: ParallelConfig, stages: Sequence[Any]
) -> dict[torch.nn.Parameter, list[TensorPiece]]:
    """Return the pieces of each parameter of this rank's stages."""
    pieces: dict[torch.nn.Parameter, list[TensorPiece]] = {}
    for stage in stages:
        number_of: dict[str, int] = {}
        for i, layer in enumerate(stage.decoder.layers):
            number_of[f"decoder.layers.{i}."] = int(layer.layer_number) - 1
        for name, parameter in stage.named_parameters():
            prefix = next((p for p in number_of if name.startswith(p)), "")
            pieces[parameter] = _pieces(
                architecture, parallel, name.removeprefix(prefix), number_of.get(prefix)
            )
    return pieces


def _pieces(
    architecture: Architecture, parallel: ParallelConfig, name: str, layer: int | None
) -> list[TensorPiece]:
    a = architecture
    config = architecture.hf_config
    tp = parallel.tensor_model_parallel_size
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    hidden = config.hidden_size
    ffn = config.intermediate_size
    vocab_size = config.vocab_size
    prefix = "model." if layer is None else f"model.layers.{layer}."
    undivided = {
        "decoder.final_layernorm": ("norm", (hidden,)),
        "input_layernorm": ("input_layernorm", (hidden,)),
        "pre_mlp_layernorm": ("post_attention_layernorm", (hidden,)),
        "self_attention.q_layernorm": ("self_attn.q_norm", (a.head_dim,)),
        "self_attention.k_layernorm": ("self_attn.k_norm", (a.head_dim,)),
        "mlp.router": ("mlp.gate", (a.num_experts, hidden)),
    }
    by_columns = {
        "self_attention.linear_proj": ("self_attn.o_proj", a.num_heads * a.head_dim),
        "mlp.linear_fc2": ("mlp.down_proj", ffn),
    }
    module, _, parameter_name = name.rpartition(".")
    if parameter_name == "layer_norm_weight":
        # Transformer Engine's layers hold the norm before them.
        module = {
            "self_attention.linear_qkv": "input_layernorm",
            "mlp.linear_fc1": "pre_mlp_layernorm",
        }[module]
    if name == "score.weight":
        return [_box(name, (1, hidden))]
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        # Divided by rows; the last rank's last rows may be padding.
        is_embedding = a.is_tied or name != "output_layer.weight"
        rows = -(-vocab_size // tp)
        count = min(rows, vocab_size - tp_rank * rows)
        hub_name = "model.embed_tokens.weight" if is_embedding else "lm_head.weight"
        if count <= 0:
            return []
        return [_box(hub_name, (vocab_size, hidden), 0, tp_rank * rows, count)]
    if module in undivided:
        hub_module, shape = undivided[module]
        return [_box(f"{prefix}{hub_module}.weight", shape)]
    if module in by_columns:
        hub_module, count = by_columns[module]
        width = count // tp
        return [_box(f"{prefix}{hub_module}.weight", (hidden, count), 1, tp_rank * width, width)]
    if module == "mlp.linear_fc1":
        rows = ffn // tp
        shape = (ffn, hidden)
        first = tp_rank * rows
        return [
            _box(f"{prefix}mlp.gate_proj.weight", shape, 0, first, rows),
            _box(f"{prefix}mlp.up_proj.weight", shape, 0, first, rows, start=rows * hidden),
        ]
    if module == "self_attention.linear_qkv":
        # Queries, key and value of each query group, one group after the other; a rank may have a part of a group.
        rows_of = {
            "q": a.num_heads // a.num_query_groups * a.head_dim,
            "k": a.head_dim,
            "v": a.head_dim,
        }
        num_rows = a.num_query_groups * sum(rows_of.values()) // tp
        columns = (hidden,) if parameter_name == "weight" else ()
        pieces: list[TensorPiece] = []
        first = -tp_rank * num_rows
        for group in range(a.num_query_groups):
            for letter, rows in rows_of.items():
                begin = max(first, 0)
                end = min(first + rows, num_rows)
                if begin < end:
                    shape = (a.num_query_groups * rows, *columns)
                    hub_name = f"{prefix}self_attn.{letter}_proj.{parameter_name}"
                    offset = group * rows + begin - first
                    pieces.append(
                        _box(
                            hub_name,
                            shape,
                            0,
                            offset,
                            end - begin,
                            start=begin * math.prod(columns),
                        )
                    )
                first += rows
        return pieces
    # Each expert is a piece of a tensor that holds all of a layer's; a parameter has one expert, or all of this rank.
    match = re.fullmatch(
        r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc([12])\.weight|weight([12]))", name
    )
    assert match is not None, f"no rule for parameter {name!r}"
    number, *halves = match.groups()
    ffn = config.moe_intermediate_size
    hub_module, shape = {
        "1": ("gate_up_proj", (2 * ffn, hidden)),
        "2": ("down_proj", (hidden, ffn)),
    }[halves[0] or halves[1]]
    num_local = a.num_experts // parallel.expert_model_parallel_size
    first = parallel_state.get_expert_model_parallel_rank() * num_local
    hub_name = f"{prefix}mlp.experts.{hub_module}"
    size = math.prod(shape)
    experts: Sequence[int] = range(num_local)
    if number is not None:
        experts = [int(number)]
    return [
        _box(hub_name, (a.num_experts, *shape), 0, first + expert, 1, start=i * size)
        for i, expert in enumerate(experts)
    ]


def _box(
    name: str,
    global_shape: tuple[int, ...],
    dim: int = 0,
    offset: int = 0,
    size: int | None = None,
    *,
    start: int = 0,
) -> TensorPiece:
    """Make a piece of a tensor that is cut in one dimension; without a size the piece is the full tensor."""
    offsets = [0] * len(global_shape)
    shape = list(global_shape)
    if size is not None:
        offsets[dim] = offset
        shape[dim] = size
    return TensorPiece(
        name=name, global_shape=global_shape, offset=tuple(offsets), shape=tuple(shape), start=start
    )


def adapter_pieces(
    weight: Sequence[TensorPiece], rank: int
) -> dict[str, tuple[TensorPiece, TensorPiece]]:
    """Return this rank's pieces of A [rank, in] and B [out, rank] of each Hugging Face layer in a linear layer."""
    of_layer: dict[str, list[TensorPiece]] = {}
    for piece in weight:
        of_layer.setdefault(piece.name.removesuffix(".weight"), []).append(piece)
    adapters: dict[str, tuple[TensorPiece, TensorPiece]] = {}
    for layer, (first, *further) in of_layer.items():
        out_features, in_features = first.global_shape
        row, column = first.offset
        rows, columns = first.shape
        rows += sum(piece.shape[0] for piece in further)
        adapters[layer] = (
            _box(layer + A_OF, (rank, in_features), 1, column, columns),
            _box(layer + B_OF, (out_features, rank), 0, row, rows),
        )
    return adapters


def gather_weights(
    pieces: Mapping[torch.nn.Parameter, Sequence[TensorPiece]],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and full tensors, one at a time and in the same order on all ranks, which all iterate to the end."""
    pairs_of: dict[str, list[tuple[TensorPiece, torch.Tensor]]] = {}
    for parameter, of_parameter in pieces.items():
        for piece in of_parameter:
            pairs_of.setdefault(piece.name, []).append((piece, parameter))
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        everyones, {name: [piece for piece, _ in pairs] for name, pairs in pairs_of.items()}
    )
    for name, senders in _senders(everyones).items():
        first = next(iter(senders.values()))[0]
        full = torch.empty(first.global_shape, dtype=dtype, device=device)
        for rank, boxes in senders.items():
            sizes = [piece.size for piece in boxes]
            if rank == dist.get_rank():
                flat: dict[tuple[int, ...], torch.Tensor] = {}
                for piece, parameter in pairs_of[name]:
                    flat[piece.offset] = piece.view(parameter.detach().view(-1)).reshape(-1)
                message = torch.cat([flat[piece.offset] for piece in boxes])
            else:
                message = torch.empty(sum(sizes), dtype=dtype, device=device)
            dist.broadcast(message, src=rank)
            for piece, part in zip(boxes, message.split(sizes), strict=True):
                full[piece.box] = part.view(piece.shape)
        yield name, full


def _senders(
    everyones: Sequence[Mapping[str, Sequence[TensorPiece]]],
) -> dict[str, dict[int, list[TensorPiece]]]:
    """Return by tensor name the boxes that each rank sends; the first of the ranks with the same box sends it."""
    senders: dict[str, dict[int, list[TensorPiece]]] = {}
    assigned: set[tuple[str, tuple[int, ...]]] = set()
    for rank, by_name in enumerate(everyones):
        for name, pieces in by_name.items():
            for piece in pieces:
                if (name, piece.offset) not in assigned:
                    assigned.add((name, piece.offset))
                    senders.setdefault(name, {}).setdefault(rank, []).append(piece)
    return senders
