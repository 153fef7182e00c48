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
    return _replace_objects(state, lambda leaf: leaf.state_dict())


def template_of(template: State) -> State:
    """Return `template` with the present state of each object in its place, for `complete_template`."""
    return _replace_objects(template, lambda leaf: _Own(leaf.state_dict()))


def complete_template(template: State, node: Node | None) -> State:
    """Return `template` (from `template_of`) with a template of all that `node` holds for each object."""
    if isinstance(template, _Own):
        return _filling(template.state, node)
    if not isinstance(template, dict | list | tuple):
        return template
    nodes = tree.fields_of(node) or dict(enumerate(tree.items_of(node) or ()))
    return _map_children(
        cast("State", template), lambda key, value: complete_template(value, nodes.get(key))
    )


def load_state_dicts(template: State, state: State) -> State:
    """Pass each object of `template` its part of the loaded `state`; return the state with the objects in it."""
    if _is_stateful(template):
        template.load_state_dict(state)
        return template
    if (
        not isinstance(template, dict | list | tuple) or not template
    ):  # an empty dict: all that was saved in its place
        return state
    return _map_children(
        cast("State", template), lambda key, value: load_state_dicts(value, state[key])
    )


def _is_stateful(leaf: object) -> TypeGuard[Stateful]:
    """Return whether `leaf` has both methods; many times faster than a check of a runtime protocol."""
    return _has_state(type(leaf))


def _has_state(leaf_type: type) -> bool:
    return hasattr(leaf_type, "load_state_dict") and hasattr(leaf_type, "state_dict")


def _are_plain(values: Iterable[State]) -> bool:
    """Return whether none of these is a container or has a state, by their types, which are few."""
    return not any(
        issubclass(leaf_type, dict | list | tuple) or _has_state(leaf_type)
        for leaf_type in {*map(type, values)}
    )


def _replace_objects(
    state: State, replacement: Callable[[Stateful], State], depth: int = 0
) -> State:
    if _is_stateful(state):
        return replacement(state)
    if depth > MAX_DEPTH:  # refused by `tree.encode`, with the path
        return state
    if not isinstance(state, dict | list | tuple):
        return state
    children = cast("Iterable[State]", state.values() if isinstance(state, dict) else state)
    if _are_plain(children):
        return cast("State", state)
    return _map_children(
        cast("State", state), lambda _, value: _replace_objects(value, replacement, depth + 1)
    )


def _map_children(state: State, act: Callable[[Any, State], State]) -> State:
    """Return a dict or a sequence of what `act` returns for each key, or number, and its value."""
    if isinstance(state, dict):
        return {
            key: act(key, value) for key, value in cast("dict[str | int, State]", state).items()
        }
    return _like(
        state, [act(number, value) for number, value in enumerate(cast("Sequence[State]", state))]
    )


def _like(sequence: State, items: list[State]) -> State:
    """Return a list, a tuple or a named tuple of these items, whichever `sequence` is."""
    if hasattr(sequence, "_fields"):
        return type(sequence)(*items)
    return items if isinstance(sequence, list) else tuple(items)


def _filling(current: State, node: Node | None) -> State:
    """Return a template of all that is saved at `node`, with the tensors of `current` that have their place there."""
    fields = tree.fields_of(node)
    items = tree.items_of(node)
    if fields is not None:
        present = cast("dict[str | int, State]", current) if isinstance(current, dict) else {}
        return {key: _filling(present.get(key), child) for key, child in fields.items()}
    if items is not None:
        values = cast("Sequence[State]", current) if isinstance(current, list | tuple) else ()
        filled = [
            _filling(values[i] if len(values) == len(items) else None, child)
            for i, child in enumerate(items)
        ]
        return filled if isinstance(node, list) else tuple(filled)
    if tree.name_of(node) is not None:
        return None if isinstance(current, dict | list | tuple) else current
    return replace(current, value=None) if isinstance(current, PerRank) else None
