"""Objects that keep a state of their own, as leaves of a state: modules, optimizers, schedulers, torch's `Stateful`.

A save replaces each by its `state_dict()`. A load gives its `load_state_dict` all that was saved in its place; tensors
that its `state_dict()` holds are filled where they are.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeGuard, cast

from gcore_ckpt.format import tree
from gcore_ckpt.format.tree import MAX_DEPTH, Node, PerRank, State


class Stateful(Protocol):
    """An object that can be saved and restored; the protocol of `torch.distributed.checkpoint.stateful`."""

    def state_dict(self) -> State: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@dataclass(frozen=True)
class _Own:
    """The state that an object of a template has before the load."""

    state: State


def with_state_dicts(state: State) -> State:
    """Return `state` with the state dict of each object in its place."""
    return _replaced(state, lambda leaf: leaf.state_dict())


def template_of(template: State) -> State:
    """Return `template` with the present state of each object in its place, for `completed`."""
    return _replaced(template, lambda leaf: _Own(leaf.state_dict()))


def completed(template: State, node: Node | None) -> State:
    """Return `template`, from `template_of`, with a template of all that is saved for each object; `node` is saved."""
    if isinstance(template, _Own):
        return _filling(template.state, node)
    if isinstance(template, dict):
        fields = tree.fields_of(node) or {}
        items = cast("dict[str | int, State]", template).items()
        return {key: completed(value, fields.get(key)) for key, value in items}
    if isinstance(template, list | tuple):
        values, nodes = cast("Sequence[State]", template), tree.items_of(node) or []
        found = [completed(value, nodes[i] if i < len(nodes) else None) for i, value in enumerate(values)]
        return _like(template, found)
    return template


def load_state_dicts(template: State, state: State) -> State:
    """Pass each object of `template` its part of the loaded `state`; return the state with the objects themselves."""
    if _is_stateful(template):
        template.load_state_dict(state)
        return template
    if isinstance(template, dict) and not template:  # all that was saved in its place
        return state
    if isinstance(template, dict):
        items = cast("dict[str | int, State]", template).items()
        return {key: load_state_dicts(value, state[key]) for key, value in items}
    if isinstance(template, list | tuple):
        found = [load_state_dicts(*pair) for pair in zip(cast("Sequence[State]", template), state, strict=True)]
        return _like(template, found)
    return state


def _is_stateful(leaf: object) -> TypeGuard[Stateful]:
    """Return whether `leaf` has both methods; many times faster than a check of a runtime protocol."""
    return _has_state(type(leaf))


def _has_state(kind: type) -> bool:
    return hasattr(kind, "load_state_dict") and hasattr(kind, "state_dict")


def _are_plain(values: Iterable[State]) -> bool:
    """Return whether none of these is a container or has a state, by their types, which are few."""
    return not any(issubclass(kind, dict | list | tuple) or _has_state(kind) for kind in {*map(type, values)})


def _replaced(state: State, replacement: Callable[[Stateful], State], depth: int = 0) -> State:
    if _is_stateful(state):
        return replacement(state)
    if depth > MAX_DEPTH:  # refused by `tree.encode`, with the path
        return state
    if isinstance(state, dict):
        fields = cast("dict[str | int, State]", state)
        if _are_plain(fields.values()):
            return state
        return {key: _replaced(value, replacement, depth + 1) for key, value in fields.items()}
    if isinstance(state, list | tuple):
        if _are_plain(cast("Sequence[State]", state)):
            return state
        found = [_replaced(value, replacement, depth + 1) for value in cast("Sequence[State]", state)]
        return _like(state, found)
    return state


def _like(sequence: State, items: list[State]) -> State:
    """Return a list, a tuple or a named tuple of these items, whichever `sequence` is."""
    if hasattr(sequence, "_fields"):
        return type(sequence)(*items)
    return items if isinstance(sequence, list) else tuple(items)


def _filling(own: State, node: Node | None) -> State:
    """Return a template of all that is saved at `node`, with the tensors of `own` that have their place there."""
    fields, items = tree.fields_of(node), tree.items_of(node)
    if fields is not None:
        present = cast("dict[str | int, State]", own) if isinstance(own, dict) else {}
        return {key: _filling(present.get(key), child) for key, child in fields.items()}
    if items is not None:
        values = cast("Sequence[State]", own) if isinstance(own, list | tuple) else ()
        found = [_filling(values[i] if len(values) == len(items) else None, child) for i, child in enumerate(items)]
        return found if isinstance(node, list) else tuple(found)
    if tree.name_of(node) is not None:
        return None if isinstance(own, dict | list | tuple) else own
    return replace(own, value=None) if isinstance(own, PerRank) else None
