"""The exchange after sampling, which gives every controller an even share of the groups."""

from collections.abc import Callable, Sequence

from gcore_controller.collectives.base import Collectives
from gcore_controller.rlhf.modality import IndexedT


async def exchange(
    groups: Sequence[IndexedT],
    costs: Sequence[float],
    *,
    balance: Callable[[list[float], int], Sequence[Sequence[int]]],
    group: Collectives,
) -> list[IndexedT]:
    """Redistribute all controllers' groups so that each gets about the same cost; see `Modality.balance`.

    The first controller computes the assignment, since all controllers may share one process. Only groups that change
    owners are sent. Returns this controller's new share, by prompt index.
    """
    mine = [(g.prompt_index, cost) for g, cost in zip(groups, costs, strict=True)]
    everyones = sorted(entry for part in await group.all_gather(mine) for entry in part)
    parts = balance([cost for _, cost in everyones], group.world_size) if group.rank == 0 else None
    owner = {everyones[i][0]: rank for rank, part in enumerate(await group.broadcast(parts)) for i in part}
    outgoing: list[list[IndexedT]] = [[] for _ in range(group.world_size)]
    for entry in groups:
        outgoing[owner[entry.prompt_index]].append(entry)
    incoming = await group.all_to_all(outgoing)
    return sorted((g for part in incoming for g in part), key=lambda g: g.prompt_index)
