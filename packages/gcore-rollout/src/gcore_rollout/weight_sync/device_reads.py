"""Small results of an accelerator, which the host reads all at once: each read alone would wait for the device."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class DeviceReads:
    """Integers [K] on a device, the same K for all, that the host reads when it asks for the first of them."""

    def __init__(self) -> None:
        self._unread: list[torch.Tensor] = []
        self._read: list[list[int]] = []

    def add(
        self, values_K: "torch.Tensor", convert: Callable[[Sequence[int]], T]
    ) -> Callable[[], T]:
        """Return a function that waits for the device, and converts the values that it has found."""
        index = len(self._read) + len(self._unread)
        self._unread.append(values_K)
        return lambda: convert(self._value(index))

    def _value(self, index: int) -> list[int]:
        unread = self._unread
        if unread:
            import torch

            self._unread = []
            device = unread[0].device
            values = torch.stack([values_K.to(device) for values_K in unread])
            self._read += values.tolist()
        return self._read[index]


class Promised(Mapping[str, T], Generic[T]):
    """A mapping whose values are computed when they are asked for; pickled as a dict of them."""

    def __init__(self, values: Mapping[str, Callable[[], T]]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> T:
        return self._values[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
