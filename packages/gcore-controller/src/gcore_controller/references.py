"""References to values: controllers pass them on, and the bytes move only to a process that gets the value."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Reference(Protocol[T_co]):
    """A small, picklable handle of a value stored elsewhere, which is read-only."""

    @property
    def nbytes(self) -> int:
        """Size of the value, as `nbytes_of` counts it."""
        ...

    async def get(self) -> T_co:
        """Return the value.

        Raises:
            ReferenceLostError: the process that put the value, or its node, was lost.
        """
        ...


class Put(Protocol):
    """Creates references; each runtime has its own."""

    def __call__(self, value: T, /) -> Reference[T]: ...


@dataclass(frozen=True)
class HeldReference(Generic[T]):
    """A reference that holds the value itself, for controllers and services that share a process."""

    value: T

    @property
    def nbytes(self) -> int:
        return nbytes_of(self.value)

    async def get(self) -> T:
        return self.value


def hold(value: T, /) -> Reference[T]:
    """Return a reference that holds the value."""
    return HeldReference(value)


def nbytes_of(value: object) -> int:
    """Count the bytes of arrays, tensors and byte strings in a value, also in mappings, sequences and dataclasses."""
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
