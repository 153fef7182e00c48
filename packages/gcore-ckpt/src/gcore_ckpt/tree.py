"""State trees as JSON: containers and small values in full, arrays by reference to a stored tensor.

A node of the encoded tree is JSON null, true, false, a string, a finite float, an integer of at most 53 bits, an array
(a list), or an object with exactly one member, whose name says what its value is:

    {"dict": {...}}  {"tuple": [...]}  {"int": "0x..."}  {"float_bits": "0x..."}  {"tensor": key}  {"array": key}
"""

import math
import struct
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, cast

State: TypeAlias = Any
"""Nested dict (str keys), list and tuple of torch tensors, numpy arrays, None, bool, int, float and str."""

Node: TypeAlias = Any
"""An encoded state: what `json` can write and read."""

ArrayKind: TypeAlias = Literal["tensor", "array"]

StatePath: TypeAlias = tuple[str | int, ...]

MAX_DEPTH = 100
_MAX_PLAIN_INT = 2**53  # what every JSON reader holds exactly


def describe(path: StatePath) -> str:
    """The place of a leaf as one would write it in Python: `state['optim'][3]`."""
    return "state" + "".join(f"[{part!r}]" for part in path)


def encode(state: State, encode_array: Callable[[object, StatePath], Node | None], path: StatePath = ()) -> Node:
    """Encodes `state`; what is no container and no small value goes to `encode_array`, which returns None to refuse it.

    Subclasses (OrderedDict, named tuples, IntEnum, ...) are encoded as the plain type they compare equal to.

    Raises:
        TypeError: A leaf of an unsupported type or a dict key that is no str, with its path.
        ValueError: More than `MAX_DEPTH` containers inside each other, as in one that contains itself.
    """
    if len(path) > MAX_DEPTH:
        raise ValueError(f"{describe(path[:3])}... nests more than {MAX_DEPTH} containers, or contains itself")
    match state:
        case None | bool() | str():
            return state
        case int():
            return int(state) if abs(state) <= _MAX_PLAIN_INT else {"int": hex(state)}
        case float():
            return float(state) if math.isfinite(state) else {"float_bits": f"0x{struct.pack('>d', state).hex()}"}
        case dict():
            fields = {_str_key(key, path): value for key, value in cast("dict[object, State]", state).items()}
            return {"dict": {key: encode(value, encode_array, (*path, key)) for key, value in fields.items()}}
        case list():
            items = cast("list[State]", state)
            return [encode(item, encode_array, (*path, i)) for i, item in enumerate(items)]
        case tuple():
            items = cast("tuple[State, ...]", state)
            return {"tuple": [encode(item, encode_array, (*path, i)) for i, item in enumerate(items)]}
        case _:
            node = encode_array(state, path)
            if node is None:
                raise TypeError(
                    f"{describe(path)} is a {type(state).__module__}.{type(state).__qualname__}; a state holds dict, "
                    "list, tuple, torch.Tensor, numpy.ndarray, None, bool, int, float and str"
                )
            return node


def decode(node: Node, array: Callable[[ArrayKind, str], object], depth: int = 0) -> State:
    """The state that `encode` made `node` of; `array` gives the tensor or array of a key.

    Raises:
        ValueError: `node` is not an encoded state.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} containers inside each other")
    match node:
        case None | bool() | str() | int() | float():
            return node
        case list():
            return [decode(item, array, depth + 1) for item in cast("list[Node]", node)]
        case {"dict": dict(mapping), **rest} if not rest:
            return {k: decode(v, array, depth + 1) for k, v in cast("dict[str, Node]", mapping).items()}
        case {"tuple": list(items), **rest} if not rest:
            return tuple(decode(item, array, depth + 1) for item in cast("list[Node]", items))
        case {"int": str(digits), **rest} if not rest:
            return int(digits, 16)
        case {"float_bits": str(bits), **rest} if not rest:
            return _float_of_bits(bits)
        case {"tensor": str(key), **rest} if not rest:
            return array("tensor", key)
        case {"array": str(key), **rest} if not rest:
            return array("array", key)
        case _:
            raise ValueError(f"unknown node {str(cast('object', node))[:80]}")


def _str_key(key: object, path: StatePath) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{describe(path)} has the key {key!r} of type {type(key).__name__}; dict keys must be str")
    return str(key)


def _float_of_bits(bits: str) -> float:
    value: float
    try:
        (value,) = struct.unpack(">d", bytes.fromhex(bits.removeprefix("0x")))
    except struct.error as error:
        raise ValueError(f"float_bits {bits!r} are not 64 bits") from error
    return value
