"""References to values in the object stores of a cluster."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import ObjectLostError

from gcore_controller.errors import ReferenceLostError
from gcore_controller.references import Reference, nbytes_of

T = TypeVar("T")


@dataclass(frozen=True)
class RayReference(Generic[T]):
    """A reference to a value in Ray's object stores; it lives as long as a reference and the process that put it."""

    object_ref: Any
    nbytes: int

    async def get(self) -> T:
        """Return the value; its arrays are read-only, and not copied if they are on this node."""
        try:
            return await self.object_ref
        except ObjectLostError as error:
            raise ReferenceLostError(
                f"a value of {self.nbytes} bytes is lost, for the process that put it or its node has ended"
            ) from error


def put(value: T, /) -> Reference[T]:
    """Copy a value into this node's object store; also for services, which have no `Context`."""
    return RayReference(ray.put(value), nbytes_of(value))
