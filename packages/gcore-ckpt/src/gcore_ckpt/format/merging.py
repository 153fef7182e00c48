"""The tree of a group, from the trees of its ranks."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, cast

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


class Replaced(NamedTuple):
    """A view on one rank, in whose place the tree of the group has a tensor that another rank stores."""

    path: StatePath
    rank: int
    view: View
    base: str
    """The tensor whose memory the view is in."""
    name: str
    """The tensor in its place."""


def merge(nodes: Sequence[Node], replaced: list[Replaced]) -> Node:
    """Return the tree of a group from those of its ranks: dicts hold the keys of all, `PerRank` the values of all.

    Where something is a view on one rank and a tensor on another, it is the tensor; the view is added to `replaced`.
    """
    return (
        nodes[0]
        if all(node == nodes[0] for node in nodes)
        else _merge(list(enumerate(nodes)), (), replaced)
    )


def _merge(nodes: list[tuple[int, Node]], path: StatePath, replaced: list[Replaced]) -> Node:
    rank, first = nodes[0]
    fields = [fields_of(node) for _, node in nodes]
    if all(rank_fields is not None for rank_fields in fields):
        dicts = cast("list[dict[str | int, Node]]", fields)
        merged: dict[str | int, Node] = {}
        for key in dict.fromkeys(chain.from_iterable(dicts)):
            children = [
                (r, entries[key])
                for (r, _), entries in zip(nodes, dicts, strict=True)
                if key in entries
            ]
            merged[key] = _merge(children, (*path, key), replaced)
        return (
            {"dict": merged}
            if all(isinstance(key, str) for key in merged)
            else {"items": list(merged.items())}
        )
    lists = [items_of(node) for _, node in nodes]
    if all(
        items is not None and lists[0] is not None and len(items) == len(lists[0])
        for items in lists
    ):
        ranks = [r for r, _ in nodes]
        merged_items: list[Node] = []
        for i, column in enumerate(zip(*cast("list[list[Node]]", lists), strict=True)):
            merged_items.append(_merge(list(zip(ranks, column, strict=True)), (*path, i), replaced))
        return merged_items if isinstance(first, list) else {"tuple": merged_items}
    values = [ranks_of(node) for _, node in nodes]
    if all(rank_values is not None for rank_values in values):
        per_rank: dict[str, Node] = {}
        for rank_values in values:
            per_rank.update(rank_values or {})
        return {"per_rank": per_rank}
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
            replaced.append(Replaced(path, r, view, base, first["tensor"]))
    for r, node in nodes[1:]:
        if node != first:
            raise ValueError(
                f"{describe(path)} is {str(first)[:60]} on rank {rank} and {str(node)[:60]} on rank {r}; "
                "wrap what each rank has of its own in PerRank"
            )
    return first
