"""Objects that keep a state of their own, as leaves of a state: modules, optimizers, schedulers, torch's `Stateful`.

A save replaces each by its `state_dict()`. A load gives its `load_state_dict` all that was saved in its place; tensors
that its `state_dict()` holds are filled where they are.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from gcore_ckpt.format import tree
from gcore_ckpt.format.tree import MAX_DEPTH, Node, PerRank, State

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


@dataclass(frozen=True)
class ObjectState:
    """The state that an object of a template has before the load."""

    state: State


def with_state_dicts(state: State) -> State:
    """Return `state` with the state dict of each object in its place."""
    return _replace_objects(state, lambda leaf: leaf.state_dict())


def template_of(template: State) -> State:
    """Return `template` with the present state of each object in its place."""
    return _replace_objects(template, lambda leaf: ObjectState(leaf.state_dict()))


def load_state_dicts(template: State, state: State) -> State:
    """Pass each object of `template` its part of the loaded `state`; return the state with the objects in it."""
    if _is_stateful(template):
        if not isinstance(state, ObjectState):  # else nothing was saved for it
            template.load_state_dict(state)
        return template
    if not isinstance(template, dict | list | tuple) or not template:
        return state  # for an empty dict, all that was saved in its place
    return _map_children(
        cast("State", template), lambda key, value: load_state_dicts(value, state[key])
    )


def _is_stateful(leaf: object) -> TypeGuard["Stateful"]:
    """Return whether `leaf` has both methods; many times faster than a check of a runtime protocol."""
    leaf_type = type(leaf)
    return hasattr(leaf_type, "load_state_dict") and hasattr(leaf_type, "state_dict")


def _replace_objects(
    state: State, replacement: "Callable[[Stateful], State]", depth: int = 0
) -> State:
    if _is_stateful(state):
        return replacement(state)
    if not isinstance(state, dict | list | tuple) or depth > MAX_DEPTH:
        return state  # what is nested too deeply is refused by `tree.encode`, with the path
    replaced = _map_children(
        cast("State", state), lambda _, value: _replace_objects(value, replacement, depth + 1)
    )
    for before, after in zip(_children(state), _children(replaced), strict=True):
        if after is not before:
            return replaced
    return cast("State", state)


def _children(state: Any) -> Iterable[State]:
    return state.values() if isinstance(state, dict) else state


def _map_children(state: State, act: Callable[[Any, State], State]) -> State:
    """Return a dict or a sequence of what `act` returns for each key, or number, and its value."""
    if isinstance(state, dict):
        fields: dict[str | int, State] = {}
        for key, value in cast("dict[str | int, State]", state).items():
            fields[key] = act(key, value)
        return fields
    items: list[State] = []
    for number, value in enumerate(cast("Sequence[State]", state)):
        items.append(act(number, value))
    return like_sequence(state, items)


def like_sequence(sequence: State, items: list[State]) -> State:
    """Return a list, a tuple or a named tuple of these items, whichever `sequence` is."""
    if hasattr(sequence, "_fields"):
        # Not by its constructor, which a subclass may have made another.
        return tuple.__new__(cast("type[tuple[State, ...]]", type(sequence)), items)
    if isinstance(sequence, list):
        return items
    return tuple(items)


def fill_template(current: State, node: Node | None) -> State:
    """Return a template of all that is saved at `node`, with the tensors of `current` that have their place there."""
    fields = tree.fields_of(node)
    items = tree.items_of(node)
    if fields is not None:
        present: dict[str | int, State] = {}
        if isinstance(current, dict):
            present = current
        filled_fields: dict[str | int, State] = {}
        for key, child in fields.items():
            filled_fields[key] = fill_template(present.get(key), child)
        return filled_fields
    if items is not None:
        values: Sequence[State] = [None] * len(items)
        if isinstance(current, list | tuple) and len(current) == len(items):
            values = current
        return like_sequence(node, [*map(fill_template, values, items)])
    if tree.name_of(node) is not None:
        return None if isinstance(current, dict | list | tuple) else current
    if isinstance(current, PerRank):
        return replace(current, value=None)
    return None
