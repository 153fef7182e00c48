"""The places of Megatron-Core's parameters in the Hugging Face model: one map for loading, export and state.

A parameter is made of pieces. Each is a box of one Hugging Face tensor, and contiguous in the parameter.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from gcore_trainer.lora import A_OF, B_OF
from gcore_trainer.megatron.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class Piece:
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

    def view(self, flat: torch.Tensor, first: int = 0) -> torch.Tensor:
        """Return the box, as a view.

        Args:
            flat: elements of the flattened parameter ...
            first: ... from this one on, among them the box.
        """
        return flat[self.start - first : self.start - first + self.size].view(self.shape)

    def within(self, start: int, end: int) -> "Iterator[Piece]":
        """Yield the parts of this piece in a range of the flattened parameter, as up to three pieces."""
        start, end = max(start, self.start) - self.start, min(end, self.start + self.size) - self.start
        columns = self.shape[-1]
        while start < end:
            row, column = divmod(start, columns)
            num_rows = (end - start) // columns if column == 0 else 0
            width = columns if num_rows else min(columns - column, end - start)
            yield self._box(row, column, max(1, num_rows), width)
            start += max(1, num_rows) * width

    def _box(self, row: int, column: int, num_rows: int, width: int) -> "Piece":
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


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank among those that divide each layer."""

    tp_rank: int
    tp_size: int
    first_expert: int
    """The lowest of this rank's experts."""


def pieces_of(architecture: Architecture, place: Place, name: str, layer: int | None) -> list[Piece]:
    """Return the pieces of one parameter.

    Args:
        architecture: of the model.
        place: this rank's.
        name: within the layer, or within the stage where it is in none.
        layer: number of the layer in the whole model, from 0; None: the parameter is in none.
    """
    make = _Maker(architecture, place, "model." if layer is None else f"model.layers.{layer}.")
    if match := re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", name):
        return make.expert(place.first_expert + int(match[1]), match[2])
    is_tied = architecture.is_tied
    match name:
        case "embedding.word_embeddings.weight":
            return make.vocabulary("model.embed_tokens.weight")
        case "output_layer.weight":
            return make.vocabulary("model.embed_tokens.weight" if is_tied else "lm_head.weight")
        case "score.weight":
            return [_whole("score.weight", (1, architecture.hidden_size))]
        case "decoder.final_layernorm.weight":
            return make.vector("norm.weight", architecture.hidden_size)
        case "input_layernorm.weight":
            return make.vector("input_layernorm.weight", architecture.hidden_size)
        case "pre_mlp_layernorm.weight":
            return make.vector("post_attention_layernorm.weight", architecture.hidden_size)
        case "self_attention.q_layernorm.weight":
            return make.vector("self_attn.q_norm.weight", architecture.head_dim)
        case "self_attention.k_layernorm.weight":
            return make.vector("self_attn.k_norm.weight", architecture.head_dim)
        case "self_attention.linear_qkv.weight":
            return make.qkv("weight", (architecture.hidden_size,))
        case "self_attention.linear_qkv.bias":
            return make.qkv("bias", ())
        case "self_attention.linear_proj.weight":
            return make.columns("self_attn.o_proj.weight", architecture.num_heads * architecture.head_dim)
        case "mlp.linear_fc1.weight":
            return make.gate_up()
        case "mlp.linear_fc2.weight":
            return make.columns("mlp.down_proj.weight", architecture.ffn_hidden_size)
        case "mlp.router.weight" if architecture.experts is not None:
            return make.matrix("mlp.gate.weight", (architecture.experts.num_experts, architecture.hidden_size))
        case _:
            raise AssertionError(f"no rule for parameter {name!r}")


def adapter_pieces(weight: Sequence[Piece], rank: int) -> dict[str, tuple[Piece, Piece]]:
    """Return the adapters of the Hugging Face layers that a linear layer is made of, each as a parameter.

    Args:
        weight: of the linear layer; each layer's rows in it follow each other in the whole tensor.
        rank: of the adapters.

    Returns:
        by name of the Hugging Face layer, what this rank has of A [rank, in] and B [out, rank].
    """
    of_layer: dict[str, list[Piece]] = {}
    for piece in weight:
        of_layer.setdefault(piece.name.removesuffix(".weight"), []).append(piece)
    adapters: dict[str, tuple[Piece, Piece]] = {}
    for layer, (first, *others) in of_layer.items():
        (out_features, in_features), (row, column), (rows, columns) = first.global_shape, first.offset, first.shape
        rows += sum(piece.shape[0] for piece in others)
        adapters[layer] = (
            Piece(
                name=layer + A_OF, global_shape=(rank, in_features), offset=(0, column), shape=(rank, columns), start=0
            ),
            Piece(name=layer + B_OF, global_shape=(out_features, rank), offset=(row, 0), shape=(rows, rank), start=0),
        )
    return adapters


class _Maker:
    """Pieces of parameters of one layer, by how they are divided."""

    def __init__(self, architecture: Architecture, place: Place, prefix: str) -> None:
        self._architecture = architecture
        self._place = place
        self._prefix = prefix

    def vector(self, name: str, size: int) -> list[Piece]:
        return [_whole(self._prefix + name, (size,))]

    def matrix(self, name: str, shape: tuple[int, ...]) -> list[Piece]:
        return [_whole(self._prefix + name, shape)]

    def vocabulary(self, name: str) -> list[Piece]:
        """Divide by rows; the last rank's last rows may be padding."""
        vocab_size, hidden_size = self._architecture.vocab_size, self._architecture.hidden_size
        rows = -(-vocab_size // self._place.tp_size)
        first = self._place.tp_rank * rows
        shape = (min(rows, vocab_size - first), hidden_size)
        if shape[0] <= 0:
            return []
        return [
            Piece(name=name, global_shape=(vocab_size, hidden_size), offset=(first, 0), shape=shape, start=0),
        ]

    def columns(self, name: str, num_columns: int) -> list[Piece]:
        """Divide by columns a matrix whose rows are the hidden size."""
        width, hidden_size = num_columns // self._place.tp_size, self._architecture.hidden_size
        return [
            Piece(
                name=self._prefix + name,
                global_shape=(hidden_size, num_columns),
                offset=(0, self._place.tp_rank * width),
                shape=(hidden_size, width),
                start=0,
            )
        ]

    def qkv(self, suffix: str, columns: tuple[int, ...]) -> list[Piece]:
        """Lay out queries, key and value of each query group, one group after the other."""
        a = self._architecture
        groups = a.num_query_groups // self._place.tp_size
        rows_of = {"q": a.num_heads // a.num_query_groups * a.head_dim, "k": a.head_dim, "v": a.head_dim}
        pieces: list[Piece] = []
        start = 0
        for group in range(self._place.tp_rank * groups, (self._place.tp_rank + 1) * groups):
            for letter, rows in rows_of.items():
                pieces.append(
                    Piece(
                        name=f"{self._prefix}self_attn.{letter}_proj.{suffix}",
                        global_shape=(a.num_query_groups * rows, *columns),
                        offset=(group * rows, *(0 for _ in columns)),
                        shape=(rows, *columns),
                        start=start,
                    )
                )
                start += pieces[-1].size
        return pieces

    def gate_up(self) -> list[Piece]:
        ffn_hidden_size, hidden_size = self._architecture.ffn_hidden_size, self._architecture.hidden_size
        rows = ffn_hidden_size // self._place.tp_size
        return [
            Piece(
                name=f"{self._prefix}mlp.{name}_proj.weight",
                global_shape=(ffn_hidden_size, hidden_size),
                offset=(self._place.tp_rank * rows, 0),
                shape=(rows, hidden_size),
                start=i * rows * hidden_size,
            )
            for i, name in enumerate(("gate", "up"))
        ]

    def expert(self, expert: int, linear: str) -> list[Piece]:
        """One expert of a tensor that holds all of a layer's."""
        experts, hidden_size = self._architecture.experts, self._architecture.hidden_size
        assert experts is not None
        name, shape = {
            "linear_fc1": ("gate_up_proj", (2 * experts.ffn_hidden_size, hidden_size)),
            "linear_fc2": ("down_proj", (hidden_size, experts.ffn_hidden_size)),
        }[linear]
        return [
            Piece(
                name=f"{self._prefix}mlp.experts.{name}",
                global_shape=(experts.num_experts, *shape),
                offset=(expert, 0, 0),
                shape=(1, *shape),
                start=0,
            )
        ]


def _whole(name: str, shape: tuple[int, ...]) -> Piece:
    return Piece(name=name, global_shape=shape, offset=tuple(0 for _ in shape), shape=shape, start=0)
