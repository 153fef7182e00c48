"""The memory that a computation on fake tensors would take."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are made inside the block and are still there, and their ``peak``.

    Those of ``excluded``, which are there before, are not counted.
    """

    def __init__(self, excluded: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._now = 0
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in excluded)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage not in self._known:
                self._known.add(storage)
                self._now += storage.nbytes()
                self.peak = max(self.peak, self._now)
                weakref.finalize(storage, self._forget, storage.nbytes())
        return result

    def _forget(self, num_bytes: int) -> None:
        self._now -= num_bytes
