"""The collectives of a rank, recorded: which, over which ranks, and the sizes and devices of their tensors."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PROCESS_GROUP = "__torch__.torch.classes.c10d.ProcessGroup"


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A call of torch.distributed.

    Attributes:
        name: That of torch's operator, such as `_allgather_base_`.
        ranks: The world's numbers of the group's ranks.
        shapes: Of the tensors, outputs first.
        size_bytes: Of the larger of outputs and inputs: what a rank gathers, or what is reduced.
        devices: Types of the devices of the tensors.
        is_object: Whether the tensors are a pickled object, or counts.
        peer: The rank that a message goes to, or comes from; None: all of the group take part.
    """

    name: str
    ranks: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    size_bytes: int
    devices: frozenset[str]
    is_object: bool
    peer: int | None


class RecordedCollectives(TorchDispatchMode):
    """Keeps the collectives of this thread in `calls`, in their order, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self.calls.append(_collective(func, [*args, *kwargs.values()]))
        return func(*args, **kwargs)


def _collective(operator: Any, arguments: list[Any]) -> Collective:
    ranks: list[int] = []
    per_argument: list[int] = []
    tensors: list[torch.Tensor] = []
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            if argument._type().qualified_name() == _PROCESS_GROUP:
                ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument))
            continue
        found = [leaf for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor)]
        per_argument.append(sum(tensor.nbytes for tensor in found))
        tensors += found
    dtypes = {tensor.dtype for tensor in tensors}
    name = operator._schema.name.removeprefix("c10d::")
    peer = None
    if name in ("send", "recv_"):
        peer = ranks[arguments[2]]
    return Collective(
        name=name,
        ranks=tuple(ranks),
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        size_bytes=max(per_argument, default=0),
        devices=frozenset(tensor.device.type for tensor in tensors),
        is_object=dtypes <= {torch.uint8, torch.int64},
        peer=peer,
    )


def check_order(calls: list[list[Collective]]) -> dict[tuple[int, ...], int]:
    """Check that the ranks of each group make its collectives in one order, and messages that their peers receive.

    Returns:
        the number of collectives of each group.
    """
    by_group: dict[tuple[int, ...], list[list[tuple[Any, ...]]]] = {}
    for rank, own in enumerate(calls):
        for ranks in {call.ranks for call in own}:
            assert rank in ranks
            order: list[tuple[Any, ...]] = []
            for call in own:
                if call.ranks == ranks and call.peer is None:
                    # Experts get as many tokens as routers choose.
                    is_even = not call.name.startswith("alltoall")
                    order.append((call.name, call.is_object, is_even and call.shapes))
            by_group.setdefault(ranks, []).append(order)
    for ranks, orders in by_group.items():
        assert len(orders) == len(ranks), ranks
        assert all(order == orders[0] for order in orders), ranks
    messages: dict[tuple[str, int, int], list[tuple[tuple[int, ...], ...]]] = {}
    for rank, own in enumerate(calls):
        for call in own:
            if call.peer is not None:
                ends = (rank, call.peer) if call.name == "send" else (call.peer, rank)
                messages.setdefault((call.name, *ends), []).append(call.shapes)
    for (_, start, end), shapes in messages.items():
        assert messages["send", start, end] == messages["recv_", start, end] == shapes
    return {ranks: len(orders[0]) for ranks, orders in by_group.items()}
