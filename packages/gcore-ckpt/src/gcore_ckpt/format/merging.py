"""The tree of a group, from the trees of its ranks."""

from collections.abc import Sequence
from typing import NamedTuple, cast

from gcore_ckpt.format.tree import Node, StatePath, View, describe, fields_of, items_of, ranks_of, split_tag, view_of


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
    return nodes[0] if all(node == nodes[0] for node in nodes) else _merge(list(enumerate(nodes)), (), replaced)


def _merge(nodes: list[tuple[int, Node]], path: StatePath, replaced: list[Replaced]) -> Node:
    rank, first = nodes[0]
    fields = [fields_of(node) for _, node in nodes]
    if all(f is not None for f in fields):
        found = cast("list[dict[str | int, Node]]", fields)
        keys = dict.fromkeys(key for f in found for key in f)
        merged = {
            key: _merge(
                [(r, f[key]) for (r, _), f in zip(nodes, found, strict=True) if key in f], (*path, key), replaced
            )
            for key in keys
        }
        return {"dict": merged} if all(isinstance(key, str) for key in merged) else {"items": list(merged.items())}
    lists = [items_of(node) for _, node in nodes]
    if all(items is not None and lists[0] is not None and len(items) == len(lists[0]) for items in lists):
        columns = zip(*cast("list[list[Node]]", lists), strict=True)
        ranks = [r for r, _ in nodes]
        merged_items = [
            _merge(list(zip(ranks, column, strict=True)), (*path, i), replaced) for i, column in enumerate(columns)
        ]
        return merged_items if isinstance(first, list) else {"tuple": merged_items}
    own = [ranks_of(node) for _, node in nodes]
    if all(found is not None for found in own):
        return {"per_rank": {key: value for found in own for key, value in (found or {}).items()}}
    views = {r: view for r, node in nodes if (view := view_of(node)) is not None}
    others = [(r, node) for r, node in nodes if r not in views]
    if views and others and split_tag(others[0][1])[0] == "tensor":
        nodes = others
        rank, first = nodes[0]
        replaced += [Replaced(path, r, view, base, first["tensor"]) for r, (base, view) in views.items()]
    for other_rank, other in nodes[1:]:
        if other != first:
            raise ValueError(
                f"{describe(path)} is {str(first)[:60]} on rank {rank} and {str(other)[:60]} on rank {other_rank}; "
                "wrap what each rank has of its own in PerRank"
            )
    return first
