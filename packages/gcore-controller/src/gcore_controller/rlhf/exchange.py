"""Exchange of groups between sampling and training, so that every controller trains on an even share."""

from collections.abc import Callable, Sequence

from gcore_controller.collectives.base import Collectives
from gcore_controller.dynamic_sampling import GroupT

Balance = Callable[[list[float], int], Sequence[Sequence[int]]]
"""``balance(costs, num_parts)``: the indices of each part."""


async def exchange(
    groups: Sequence[GroupT], costs: Sequence[float], *, balance: Balance, group: Collectives
) -> list[GroupT]:
    """Redistribute all controllers' groups so that each gets about the same cost.

    The first controller computes the assignment, since all controllers may share one process. Only groups that change
    owners are sent.

    Args:
        groups: this controller's.
        costs: of each group, in any unit.
        balance: divides the groups of all controllers, ordered by prompt index, into one part per controller.
        group: all controllers.

    Returns:
        This controller's new share, by prompt index.
    """
    mine = [(g.prompt_index, cost) for g, cost in zip(groups, costs, strict=True)]
    everyones = sorted(entry for part in await group.all_gather(mine) for entry in part)
    parts = balance([cost for _, cost in everyones], group.world_size) if group.rank == 0 else None
    owner = {everyones[i][0]: rank for rank, part in enumerate(await group.broadcast(parts)) for i in part}
    outgoing: list[list[GroupT]] = [[] for _ in range(group.world_size)]
    for entry in groups:
        outgoing[owner[entry.prompt_index]].append(entry)
    incoming = await group.all_to_all(outgoing)
    return sorted((g for part in incoming for g in part), key=lambda g: g.prompt_index)
