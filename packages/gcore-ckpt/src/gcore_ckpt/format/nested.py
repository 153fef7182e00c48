"""States put together from leaves and their paths, as `torch.distributed.checkpoint` keeps them."""

from typing import cast

from gcore_ckpt.format.tree import State, StatePath

_MAX_LIST = 2**20


class NestedState(dict[str | int, State]):
    """A state, or a dict or list in it, that grows leaf by leaf; no value that is added is one.

    A container whose parts of paths are all integers is a list.
    """

    def put(self, path: StatePath, value: State) -> None:
        """Add a leaf; `ValueError` if it cannot be there with those that were added before."""
        *outer, last = path
        children = self
        for part in outer:
            child = children.setdefault(part, NestedState())
            if not isinstance(child, NestedState):
                raise ValueError(f"its path {path} leads through a value")
            children = child
        if last in children:
            raise ValueError(f"its path {path} is another's")
        children[last] = value

    def state(self) -> dict[str | int, State]:
        """Return the state; `ValueError` for a list that is too long."""
        return {key: _with_lists(value) for key, value in self.items()}


def _with_lists(node: State) -> State:
    if not isinstance(node, NestedState):
        return node
    children = {key: _with_lists(child) for key, child in node.items()}
    if not all(isinstance(key, int) for key in children):
        return children
    length = max(cast("list[int]", list(children))) + 1
    if length > _MAX_LIST:
        raise ValueError(f"a list has {length} items; expected at most {_MAX_LIST}")
    return [children.get(number) for number in range(length)]  # torch leaves out what is empty
