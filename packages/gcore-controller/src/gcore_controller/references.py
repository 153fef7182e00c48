"""References: controllers hand on where a value lies, and its bytes move only to who asks for them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Reference(Protocol[T_co]):
    """A small, picklable handle of a value that lies elsewhere, to be read and not to be written."""

    @property
    def nbytes(self) -> int:
        """Bytes of the value, as `nbytes_of` counts them."""
        ...

    async def get(self) -> T_co:
        """The value.

        Raises:
            ReferenceLostError: the value went with the process that had put it, or with its node.
        """
        ...


class Put(Protocol):
    """How a runtime makes references."""

    def __call__(self, value: T, /) -> Reference[T]: ...


@dataclass(frozen=True)
class HeldReference(Generic[T]):
    """Holds the value itself, where controllers and services share a process."""

    value: T

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.value)

    async def get(self) -> T:
        return self.value


def hold(value: T, /) -> Reference[T]:
    """Put a value where it is."""
    return HeldReference(value)


def nbytes_of(value: object) -> int:
    """Bytes of the arrays, tensors and byte strings in a value, through mappings, lists, tuples and dataclasses."""
    items: list[Any]
    match value:
        case bytes() | bytearray():
            return len(value)
        case Mapping():
            items = list(value.values())
        case list() | tuple():
            items = list(value)
        case _ if is_dataclass(value) and not isinstance(value, type):
            items = [getattr(value, field.name) for field in fields(value)]
        case _:
            return int(getattr(value, "nbytes", 0))
    return sum(nbytes_of(item) for item in items)
