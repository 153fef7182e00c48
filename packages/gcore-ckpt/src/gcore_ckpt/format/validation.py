"""Validation of JSON from untrusted sources: each part by its exact type and within its bounds, else `ValueError`."""

import math
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from gcore_ckpt.errors import CorruptCheckpointError

T = TypeVar("T")

MAX_ELEMENTS = 2**63 - 1
"""Most elements that a tensor can have, even where another dimension is 0."""


@contextmanager
def reading(where: object, *kinds: type[Exception]) -> Generator[None]:
    """Raise a `ValueError` of the block, or an error of other kinds, as `CorruptCheckpointError`."""
    try:
        yield
    except (ValueError, *kinds) as error:
        raise CorruptCheckpointError(f"{where}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Return the message of an error; that of a `KeyError` says that the member is missing."""
    return f"{error} is missing" if type(error) is KeyError else str(error)


def expect(expected: type[T], value: object, name: str) -> T:
    """Return `value` after checking that it is of the type `expected` itself: bool is no int."""
    if type(value) is not expected:
        raise ValueError(f"{name} is {str(value)[:80]}; expected {expected.__name__}")
    return cast("T", value)


def member(fields: Mapping[str, Any], name: str, expected: type[T]) -> T:
    """Return the member `name` after checking that it is of the type `expected`; `KeyError` if it is missing."""
    return expect(expected, fields[name], name)


def size(value: object, name: str) -> int:
    """Return `value` after checking that it is a number of bytes or elements."""
    number = expect(int, value, name)
    if number < 0:
        raise ValueError(f"{name} is {number}; expected 0 or more")
    if number > MAX_ELEMENTS:
        raise ValueError(f"{name} is {number}; expected 2**63 - 1 or less")
    return number


def sizes(value: object, name: str) -> tuple[int, ...]:
    """Return sizes, one for each dimension, after checking them."""
    return tuple(size(item, name) for item in expect(list, value, name))


def members(value: object, count: int, name: str) -> list[Any]:
    """Return the items of a list after checking how many they are."""
    items = expect(list, value, name)
    if len(items) != count:
        raise ValueError(f"{name} has {len(items)} members; expected {count}")
    return items


def numbers(value: object, name: str, count: int) -> list[int]:
    """Return the items of a list after checking that each is a number of 0 or more, less than `count`."""
    items = expect(list, value, name)
    for item in items:
        if type(item) is not int or not 0 <= item < count:
            raise ValueError(f"{name} is {str(item)[:80]}; expected 0 or more, less than {count}")
    return items


def shape(value: object, name: str) -> tuple[int, ...]:
    """Return a shape after checking that a tensor of it can exist."""
    extents = sizes(value, name)
    if math.prod(max(1, extent) for extent in extents) > MAX_ELEMENTS:
        raise ValueError(f"{name} {extents} is too large")
    return extents


def plain_name(name: str) -> str:
    """Return the name after checking that it is one of a file inside a folder."""
    if name in ("", ".", "..") or any(char in name for char in "/\\\0"):
        raise ValueError(f"file name {name!r} is not a plain name inside the folder")
    return name
