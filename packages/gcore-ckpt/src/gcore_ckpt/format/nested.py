"""States put together from leaves and their paths, as `torch.distributed.checkpoint` keeps them."""

from typing import cast

from gcore_ckpt.format.tree import State, StatePath

_MAX_LIST = 2**20


class NestedState:
    """A state that grows leaf by leaf; a container whose parts of paths are all integers is a list."""

    def __init__(self) -> None:
        self._root = _Children()

    def put(self, path: StatePath, value: State) -> None:
        """Add a leaf; `ValueError` if it cannot be there with those that were added before."""
        *outer, last = path
        children = self._root
        for part in outer:
            child = children.setdefault(part, _Children())
            if not isinstance(child, _Children):
                raise ValueError(f"its path {path} leads through a value")
            children = child
        if last in children:
            raise ValueError(f"its path {path} is another's")
        children[last] = value

    def state(self) -> dict[str | int, State]:
        """Return the state; `ValueError` for a list that is too long."""
        return {key: _with_lists(value) for key, value in self._root.items()}


class _Children(dict[str | int, State]):
    """A dict or list of the state, while it is put together; no value that was added is one."""


def _with_lists(node: State) -> State:
    if not isinstance(node, _Children):
        return node
    children = {key: _with_lists(child) for key, child in node.items()}
    if not all(isinstance(key, int) for key in children):
        return children
    length = max(cast("list[int]", list(children))) + 1
    if length > _MAX_LIST:
        raise ValueError(f"a list has {length} items; expected at most {_MAX_LIST}")
    return [children.get(number) for number in range(length)]  # torch leaves out what is empty
