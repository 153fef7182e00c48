"""Between sampling and training: an even share of simulated work for every controller, in micro-batches that fit."""

from collections.abc import Sequence

import numpy as np

from gcore_controller import Collectives
from gcore_llm.groups import Group
from gcore_placement import TransformerWorkload, balance, micro_batches


def group_cost(workload: TransformerWorkload, group: Group) -> float:
    """Simulated FLOPs of training on a group, its prompt computed once."""
    return float(workload.group_flops(group.prompt_ids.size, group.lengths))


async def exchange(groups: Sequence[Group], *, workload: TransformerWorkload, group: Collectives) -> list[Group]:
    """Spread all controllers' groups so that each gets about the same simulated work.

    Every controller computes the same assignment from the same costs; only groups that change hands move.

    Returns:
        this controller's new share, by ticket.
    """
    mine = [(g.ticket, group_cost(workload, g)) for g in groups]
    everyones = sorted(entry for part in await group.all_gather(mine) for entry in part)
    parts = balance([cost for _, cost in everyones], group.world_size)
    owner = {everyones[i][0]: rank for rank, part in enumerate(parts) for i in part.tolist()}
    outgoing: list[list[Group]] = [[] for _ in range(group.world_size)]
    for entry in groups:
        outgoing[owner[entry.ticket]].append(entry)
    incoming = await group.all_to_all(outgoing)
    return sorted((g for part in incoming for g in part), key=lambda g: g.ticket)


def split_in_micro_batches(
    groups: Sequence[Group], *, workload: TransformerWorkload, max_tokens: int
) -> list[list[tuple[int, int]]]:
    """Micro-batches of (group index, response index) within ``max_tokens`` packed tokens, of about even work.

    A group stays whole, so that its prompt is computed once, unless it alone exceeds the budget.
    """
    units: list[list[tuple[int, int]]] = []
    tokens: list[int] = []
    costs: list[float] = []
    for g, group in enumerate(groups):
        lengths = group.lengths
        for part in micro_batches(lengths, max_tokens=max(1, max_tokens - group.prompt_ids.size)):
            units.append([(g, i) for i in part.tolist()])
            tokens.append(group.prompt_ids.size + int(lengths[part].sum()))
            costs.append(float(workload.group_flops(group.prompt_ids.size, lengths[part])))
    if not units:
        return []
    return [
        [pair for unit in np.sort(batch).tolist() for pair in units[unit]]
        for batch in micro_batches(tokens, max_tokens=max_tokens, costs=costs)
    ]
