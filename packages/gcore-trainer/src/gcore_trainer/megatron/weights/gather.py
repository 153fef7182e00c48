"""Whole Hugging Face tensors from the pieces that ranks have of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gcore_trainer.megatron.weights.pieces import Piece


def gather_weights(
    pieces: Mapping[torch.nn.Parameter, Sequence[Piece]], *, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and whole tensors, one at a time and in the same order on all ranks, which all iterate to the end.

    Args:
        pieces: of this rank's parameters, if it has any.
        dtype: of all ranks' parameters.
        device: of this rank's.
    """
    own: dict[str, list[tuple[Piece, torch.Tensor]]] = {}
    for parameter, of_parameter in pieces.items():
        for piece in of_parameter:
            own.setdefault(piece.name, []).append((piece, parameter))
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, {name: [piece for piece, _ in pairs] for name, pairs in own.items()})
    for name, senders in _senders(everyones).items():
        first = next(iter(senders.values()))[0]
        whole = torch.empty(first.global_shape, dtype=dtype, device=device)
        for rank, boxes in senders.items():
            sizes = [piece.size for piece in boxes]
            if rank == dist.get_rank():
                flat = {piece.offset: piece.view(p.detach().view(-1)).reshape(-1) for piece, p in own[name]}
                message = torch.cat([flat[piece.offset] for piece in boxes])
            else:
                message = torch.empty(sum(sizes), dtype=dtype, device=device)
            dist.broadcast(message, src=rank)
            for piece, part in zip(boxes, message.split(sizes), strict=True):
                box = tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.shape, strict=True))
                whole[box] = part.view(piece.shape)
        yield name, whole


def _senders(everyones: Sequence[Mapping[str, Sequence[Piece]]]) -> dict[str, dict[int, list[Piece]]]:
    """By name, the ranks that send something of it: of ranks with the same box, the first."""
    senders: dict[str, dict[int, list[Piece]]] = {}
    taken: set[tuple[str, tuple[int, ...]]] = set()
    for rank, by_name in enumerate(everyones):
        for name, pieces in by_name.items():
            for piece in pieces:
                if (name, piece.offset) not in taken:
                    taken.add((name, piece.offset))
                    senders.setdefault(name, {}).setdefault(rank, []).append(piece)
    return senders
