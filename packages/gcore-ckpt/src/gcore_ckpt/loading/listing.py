"""The leaves of a step, one by one: what tables, comparisons and exports are made of. Needs no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from gcore_ckpt.errors import CorruptCheckpointError
from gcore_ckpt.format.tree import MAX_DEPTH, Node, State, StatePath, decode, dict_fields, tensor_name, tuple_items
from gcore_ckpt.loading.reader import StepReader


@dataclass(frozen=True, kw_only=True)
class StepLeaf:
    """A leaf of a saved state; an empty container is one too.

    Attributes:
        path: Its place, dotted: `optim.state.0.step`.
        tensor: Name of the stored tensor or array; None for a small value.
        value: The small value.
        per_rank: Whether it is one rank's own.
    """

    path: str
    tensor: str | None
    value: State
    per_rank: bool


def step_leaves(reader: StepReader, prefix: str = "") -> list[StepLeaf]:
    """Return the leaves of a step in the order of its state.

    Args:
        reader: The step.
        prefix: Dotted path of the part to list; empty for all.

    Raises:
        CorruptCheckpointError: Its tree is none, or refers to what the index does not have.
    """
    try:
        leaves = list(_leaves(reader.index.tree, (), per_rank=False))
    except ValueError as error:
        raise CorruptCheckpointError(f"{reader.where}/index.json: tree: {error}") from error
    for leaf in leaves:
        if leaf.tensor is not None and leaf.tensor not in reader.index.tensors:
            raise CorruptCheckpointError(f"{reader.where}/index.json: tree: {leaf.tensor!r} is not in the index")
    return [leaf for leaf in leaves if not prefix or leaf.path == prefix or leaf.path.startswith(f"{prefix}.")]


def _leaves(node: Node, path: StatePath, *, per_rank: bool) -> Iterator[StepLeaf]:
    if len(path) > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} containers inside each other")
    ranks = node.get("per_rank") if isinstance(node, dict) else None
    if isinstance(ranks, dict):
        for rank, child in ranks.items():
            yield from _leaves(child, (*path, f"rank {rank}"), per_rank=True)
        return
    fields, items = dict_fields(node), tuple_items(node)
    for key, child in (fields or dict(enumerate(items or ()))).items():
        yield from _leaves(child, (*path, key), per_rank=per_rank)
    if not fields and not items:
        name = tensor_name(node)
        value = None if name is not None else decode(node, _no_array, _no_rank)
        yield StepLeaf(path=".".join(map(str, path)), tensor=name, value=value, per_rank=per_rank)


def _no_array(kind: str, name: str) -> object:
    raise ValueError(f"unknown place of {kind} {name!r}")


def _no_rank(nodes: object) -> Node:
    raise ValueError(f"unknown node {str(nodes)[:80]}")
