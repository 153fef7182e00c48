"""The tree of a group, from the trees of its ranks."""

from collections.abc import Sequence
from typing import TypeAlias

from gcore_ckpt.format.tree import (
    Node,
    StatePath,
    View,
    describe,
    fields_of,
    items_of,
    ranks_of,
    split_tag,
    view_of,
)

Replaced: TypeAlias = tuple[StatePath, int, View, str, str]
"""A view on one rank, in whose place the tree of the group has a tensor that another rank stores.

Its path, the rank, the view, the name of the tensor whose memory the view is in, and that of the tensor in its place.
"""


def merge(nodes: Sequence[Node], replaced: list[Replaced]) -> Node:
    """Return the tree of a group from those of its ranks: dicts hold the keys of all, `PerRank` the values of all.

    Where something is a view on one rank and a tensor on another, it is the tensor; the view is added to `replaced`.
    """
    if all(node == nodes[0] for node in nodes):
        return nodes[0]
    return _merge(list(enumerate(nodes)), (), replaced)


def _merge(nodes: list[tuple[int, Node]], path: StatePath, replaced: list[Replaced]) -> Node:
    rank, first = nodes[0]
    dicts: list[tuple[int, dict[str | int, Node]]] = []
    lists: list[tuple[int, list[Node]]] = []
    values: dict[str, Node] = {}
    num_per_rank = 0
    for r, node in nodes:
        fields = fields_of(node)
        items = items_of(node)
        rank_values = ranks_of(node)
        if fields is not None:
            dicts.append((r, fields))
        elif items is not None:
            lists.append((r, items))
        elif rank_values is not None:
            values.update(rank_values)
            num_per_rank += 1
    if len(dicts) == len(nodes):
        return _merge_dicts(dicts, path, replaced)
    if len(lists) == len(nodes) and len({len(items) for _, items in lists}) == 1:
        merged_items: list[Node] = []
        for i in range(len(lists[0][1])):
            column = [(r, items[i]) for r, items in lists]
            merged_items.append(_merge(column, (*path, i), replaced))
        if isinstance(first, list):
            return merged_items
        return {"tuple": merged_items}
    if num_per_rank == len(nodes):
        return {"per_rank": values}
    views: list[tuple[int, str, View]] = []
    tensors: list[tuple[int, Node]] = []
    for r, node in nodes:
        named_view = view_of(node)
        if named_view is None:
            tensors.append((r, node))
        else:
            views.append((r, *named_view))
    if views and tensors and split_tag(tensors[0][1])[0] == "tensor":
        nodes = tensors
        rank, first = nodes[0]
        for r, base, view in views:
            replaced.append((path, r, view, base, first["tensor"]))
    for r, node in nodes[1:]:
        if node != first:
            raise ValueError(
                f"{describe(path)} is {str(first)[:60]} on rank {rank} and {str(node)[:60]} on rank {r}; "
                "wrap what each rank has of its own in PerRank"
            )
    return first


def _merge_dicts(
    dicts: list[tuple[int, dict[str | int, Node]]], path: StatePath, replaced: list[Replaced]
) -> Node:
    children: dict[str | int, list[tuple[int, Node]]] = {}
    for rank, fields in dicts:
        for key, node in fields.items():
            children.setdefault(key, []).append((rank, node))
    merged: dict[str | int, Node] = {}
    for key, nodes in children.items():
        merged[key] = _merge(nodes, (*path, key), replaced)
    if all(isinstance(key, str) for key in merged):
        return {"dict": merged}
    return {"items": list(merged.items())}
