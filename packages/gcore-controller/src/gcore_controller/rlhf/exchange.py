"""Groups that change their controller, so that each trains on an even share."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeVar

from gcore_controller.collectives.base import Collectives
from gcore_controller.rlhf.modality import GroupT

T = TypeVar("T")


async def exchange(
    groups: Sequence[GroupT],
    costs: Sequence[float],
    *,
    balance: Callable[[list[float], int], Sequence[Sequence[int]]],
    group: Collectives,
) -> list[GroupT]:
    """Redistribute all controllers' groups so that each gets about the same cost; see `Modality.balance`.

    The first controller computes the assignment, since all controllers may share one process. Only groups that change
    owners are sent. Returns this controller's new share, by prompt index.
    """
    mine = [(g.prompt_index, cost) for g, cost in zip(groups, costs, strict=True)]
    everyones = sorted(await gather_all(group, mine))
    parts = None
    if group.rank == 0:
        parts = balance([cost for _, cost in everyones], group.world_size)
    owners: dict[int, int] = {}
    for rank, part in enumerate(await group.broadcast(parts)):
        for i in part:
            owners[everyones[i][0]] = rank
    outgoing: list[list[GroupT]] = [[] for _ in range(group.world_size)]
    for entry in groups:
        outgoing[owners[entry.prompt_index]].append(entry)
    incoming = await group.all_to_all(outgoing)
    return sorted(chain.from_iterable(incoming), key=lambda g: g.prompt_index)


async def gather_all(group: Collectives, values: list[T]) -> list[T]:
    """Return the values of all controllers in one list, in rank order."""
    return list(chain.from_iterable(await group.all_gather(values)))
