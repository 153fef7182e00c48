"""State trees as JSON: containers and small values in full, arrays by reference to a stored tensor.

A node of the encoded tree is JSON null, true, false, a string, a finite float, an integer of at most 53 bits, an array
(a list), or an object with exactly one member, whose name says what its value is:

    {"dict": {...}}  {"items": [[key, value], ...]}  {"tuple": [...]}  {"int": "0x..."}  {"float_bits": "0x..."}
    {"tensor": name}  {"array": name}  {"per_rank": {"0": value, ...}}
    {"bytes": base64}  {"set": [...]}  {"frozenset": [...]}  {"numpy_scalar": [dtype, hex]}
    {"view": [name, shape, stride, offset]}

`items` is a dict with integers among its keys. What follows `per_rank` is of version 3: items of a set are sorted by
their JSON; a view is a tensor in the memory of another one, by elements of that, which is contiguous.
"""

import base64
import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeAlias, cast

from gcore_ckpt.format import validation

State: TypeAlias = Any
"""Nested dict (str or int keys), list, tuple and dataclass of tensors, arrays and small values."""

Node: TypeAlias = Any
"""An encoded state: what `json` can write and read."""

ArrayKind: TypeAlias = Literal["tensor", "array"]


class View(NamedTuple):
    """A tensor in the memory of a contiguous one: its shape, strides and first element, counted in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def stop(self) -> int:
        """One past its last element; 0 if it has none."""
        if not all(self.shape):
            return 0
        last = self.offset
        for extent, step in zip(self.shape, self.stride, strict=True):
            last += (extent - 1) * step
        return last + 1


ArrayOf: TypeAlias = Callable[[ArrayKind, str, View | None], object]
"""Returns what a node that refers to a stored tensor stands for."""

StatePath: TypeAlias = tuple[str | int, ...]

MAX_DEPTH = 100
NUMPY_SCALARS = "biufcmM"
"""Kinds of numpy scalars that can be saved: bool, integers, floats, complex numbers, time spans and times."""
_NUMPY_SCALAR = re.compile(rf"[<|][{NUMPY_SCALARS}]\d{{1,2}}(\[\d*[a-zA-Z]+\])?")
_SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_MAX_PLAIN_INT = 2**53  # what every JSON reader holds exactly


@dataclass(frozen=True)
class PerRank:
    """A part of a state that is each rank's own, such as its random number generator; `value` is any state.

    It is loaded by as many ranks as saved it, each of which gets its own value; by other numbers of ranks where the
    template says what a rank gets then.

    Example:
        >>> generator = torch.Generator().manual_seed(1)
        >>> with Checkpointer("random") as checkpointer:
        ...     checkpointer.save(1, {"rng": PerRank(generator.get_state())}).wait()
        >>> template = {"rng": PerRank(None, otherwise="first")}  # also for another number of ranks
        >>> state = Checkpointer("random").load(template)
        >>> torch.equal(state["rng"], generator.get_state())
        True
    """

    value: State
    otherwise: "Literal['first'] | Callable[[int, int], State] | None" = None
    """In a template, what a rank gets if another number of ranks saved it: what the first rank saved; what a function
    of the rank and the number of ranks returns, such as a new seed; None: an error."""

    def __post_init__(self) -> None:
        if not (self.otherwise in (None, "first") or callable(self.otherwise)):
            raise ValueError(
                f"otherwise is {self.otherwise!r}; expected None, 'first' or a function of rank and size"
            )


class Leaf(NamedTuple):
    """An encoded leaf, and the key that it takes in its dict where its own name is what counts in all processes."""

    node: Node
    key: str | None = None


LeafEncoder: TypeAlias = Callable[[object, StatePath], Leaf | None]


def describe(path: StatePath) -> str:
    """Return the place of a leaf as one would write it in Python: `state['optim'][3]`."""
    return "state" + "".join(f"[{part!r}]" for part in path)


def encode(state: State, encode_leaf: LeafEncoder, rank: int = 0, path: StatePath = ()) -> Leaf:
    """Encode `state`; leaves other than small values are encoded by `encode_leaf`, which returns None to refuse one.

    Values of subclasses (OrderedDict, named tuples, ...) are encoded as the plain type they compare equal to, members
    of an Enum as their values, and dataclasses as dicts of their fields; keys of subclasses are refused, so that each
    key comes back as it was.

    Raises:
        TypeError: A leaf or a dict key of an unsupported type, with its path.
        ValueError: More than `MAX_DEPTH` containers inside each other, as in one that contains itself; or two entries
            of a dict that would be stored under one key.
    """
    if len(path) > MAX_DEPTH:
        raise ValueError(
            f"{describe(path[:3])}... nests more than {MAX_DEPTH} containers, or contains itself"
        )
    match state:
        case Enum():
            return encode(state.value, encode_leaf, rank, path)
        case None | bool():
            return Leaf(node=state)
        case str():
            _check_text(state, path)
            return Leaf(node=state)
        case int():
            return Leaf(node=_encode_int(state))
        case float():
            if math.isfinite(state):
                return Leaf(node=float(state))
            return Leaf(node={"float_bits": f"0x{struct.pack('>d', state).hex()}"})
        case bytes():
            return Leaf(node={"bytes": base64.b64encode(state).decode()})
        case set() | frozenset():
            members = [
                encode(item, lambda *_: None, rank, (*path, "item")).node
                for item in cast("set[State]", state)
            ]
            # Ranks that have the same set iterate over it in different orders.
            members.sort(key=json.dumps)
            if isinstance(state, set):
                return Leaf(node={"set": members})
            return Leaf(node={"frozenset": members})
        case dict():
            return Leaf(
                node=_encode_dict(cast("dict[object, State]", state), encode_leaf, rank, path)
            )
        case list() | tuple():
            items: list[Node] = []
            for i, child in enumerate(cast("Sequence[State]", state)):
                items.append(encode(child, encode_leaf, rank, (*path, i)).node)
            if isinstance(state, list):
                return Leaf(node=items)
            return Leaf(node={"tuple": items})
        case PerRank():
            encoded = encode(state.value, encode_leaf, rank, (*path, f"rank {rank}"))
            return Leaf(node={"per_rank": {str(rank): encoded.node}})
        case _:
            leaf = encode_leaf(state, path)
            if leaf is None and is_dataclass(state) and not isinstance(state, type):
                return Leaf(node=_encode_dict(fields_of_dataclass(state), encode_leaf, rank, path))
            if leaf is None:
                raise TypeError(
                    f"{describe(path)} is a {type(state).__module__}.{type(state).__qualname__}; a state holds dict, "
                    "list, tuple, set, dataclass, torch.Tensor, numpy.ndarray, numpy scalars, None, bool, int, float, "
                    "str, bytes and Enum"
                )
            return leaf


def fields_of_dataclass(state: Any) -> dict[Any, State]:
    """Return the fields of a dataclass by name."""
    return {field.name: getattr(state, field.name) for field in fields(state)}


def _encode_dict(
    state: dict[object, State], encode_leaf: LeafEncoder, rank: int, path: StatePath
) -> Node:
    fields: dict[str | int, Node] = {}
    owners: dict[str | int, tuple[str | int, bool]] = {}
    for key, value in state.items():
        plain = _checked_key(key, path)
        leaf = encode(value, encode_leaf, rank, (*path, plain))
        is_named = leaf.key is not None
        stored = plain
        if leaf.key is not None:
            stored = leaf.key
        # Shards of one tensor may be entries of one dict (Megatron's layers): they are one entry in all processes.
        if stored in fields and not (
            is_named and owners[stored][1] and fields[stored] == leaf.node
        ):
            raise ValueError(
                f"{describe(path)} has the keys {owners[stored][0]!r} and {plain!r}, of which both would be stored as "
                f"{stored!r}; expected names of shards that are no other entry's key"
            )
        fields[stored] = leaf.node
        owners[stored] = (plain, is_named)
    if all(isinstance(key, str) for key in fields):
        return {"dict": fields}
    items: list[Node] = []
    for key, node in fields.items():
        if isinstance(key, int):
            key = _encode_int(key)
        items.append([key, node])
    return {"items": items}


def decode(
    node: Node,
    array: ArrayOf,
    per_rank: Callable[[Mapping[str, Node]], Node],
    depth: int = 0,
) -> State:
    """Return the state that `encode` made `node` of."""
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} containers inside each other")
    match split_tag(node):
        case ("tensor" | "array") as kind, str(name):
            return array(kind, name, None)
        case "view", list():
            name, view = cast("tuple[str, View]", view_of(node))
            return array("tensor", name, view)
        case "per_rank", dict(nodes):
            return decode(per_rank(cast("dict[str, Node]", nodes)), array, per_rank, depth + 1)
        case "int", str(digits):
            return int(digits, 16)
        case "float_bits", str(bits):
            return _float_of_bits(bits)
        case "bytes", str(text):
            return base64.b64decode(text, validate=True)
        case ("set" | "frozenset") as kind, list(items):
            members = _set_of(_decode_items(items, array, per_rank, depth))
            if kind == "set":
                return members
            return frozenset(members)
        case "numpy_scalar", [str(dtype), str(digits)]:
            return _numpy_scalar(dtype, digits)
        case "tuple", list(items):
            return tuple(_decode_items(items, array, per_rank, depth))
        case None, list(items):
            return _decode_items(items, array, per_rank, depth)
        case None, None | bool() | str() | int() | float():
            return node
        case _:
            fields = fields_of(node)
            if fields is None:
                raise ValueError(f"unknown node {str(cast('object', node))[:80]}")
            values = _decode_items([*fields.values()], array, per_rank, depth)
            return dict(zip(fields, values, strict=True))


def _decode_items(
    items: Sequence[Node],
    array: ArrayOf,
    per_rank: Callable[[Mapping[str, Node]], Node],
    depth: int,
) -> list[State]:
    return [decode(item, array, per_rank, depth + 1) for item in items]


def split_tag(node: Node) -> tuple[str | None, Any]:
    """Return the name and the value of an object's only member; None and the node for any other node."""
    if not isinstance(node, dict):
        return None, node
    members = cast("dict[str, Any]", node)
    if len(members) != 1:
        return None, node
    return next(iter(members.items()))


def fields_of(node: Node) -> dict[str | int, Node] | None:
    """Return the keys and nodes of an encoded dict; None for any other node. `ValueError` for a key of another type."""
    match split_tag(node):
        case "dict", dict(fields):
            return cast("dict[str | int, Node]", fields)
        case "items", list(items):
            return dict(_item(item) for item in cast("list[Node]", items))
        case _:
            return None


def name_of(node: Node) -> str | None:
    """Return the name of the tensor or array that a node refers to; None for any other node."""
    match split_tag(node):
        case (("tensor" | "array"), str(name)):
            return name
        case _:
            return None


def view_of(node: Node) -> tuple[str, View] | None:
    """Return the name of the tensor whose memory an encoded view is in, and the view; None for any other node."""
    tag, value = split_tag(node)
    if tag != "view":
        return None
    parts = cast("list[object]", validation.expect(list, value, "view"))
    if len(parts) != 4:
        raise ValueError(
            f"a view has {len(parts)} parts; expected a name, a shape, strides and an offset"
        )
    name, shape, stride, offset = parts
    view = View(
        validation.shape(shape, "shape of a view"),
        validation.sizes(stride, "stride of a view"),
        validation.size(offset, "offset of a view"),
    )
    if len(view.shape) != len(view.stride):
        raise ValueError(f"a view has shape {view.shape} and stride {view.stride}")
    return validation.expect(str, name, "tensor of a view"), view


def tensor_of(node: Node) -> tuple[str | None, View | None]:
    """Return the name of the tensor or array that a node refers to, and its view; None where there is none."""
    return view_of(node) or (name_of(node), None)


def items_of(node: Node) -> list[Node] | None:
    """Return the items of an encoded list or tuple; None for any other node."""
    match split_tag(node):
        case ((None | "tuple"), list(items)):
            return cast("list[Node]", items)
        case _:
            return None


def ranks_of(node: Node) -> dict[str, Node] | None:
    """Return the nodes of an encoded `PerRank` by rank; None for any other node."""
    match split_tag(node):
        case "per_rank", dict(nodes):
            return cast("dict[str, Node]", nodes)
        case _:
            return None


def references(node: Node) -> Iterator[str]:
    """Return the names of all tensors and arrays in a tree."""
    name, _ = tensor_of(node)
    if name is not None:
        yield name
        return
    for child in (fields_of(node) or ranks_of(node) or {}).values() or items_of(node) or ():
        yield from references(child)


def _checked_key(key: object, path: StatePath) -> str | int:
    if type(key) is str:
        _check_text(key, path)
        return key
    if type(key) is int:
        return key
    hint = ""
    if isinstance(key, Enum):
        hint = ", or its value"
    raise TypeError(
        f"{describe(path)} has the key {key!r} of type {type(key).__name__}; dict keys must be str or int themselves, "
        f"no other or derived type; expected str(key) or int(key){hint}"
    )


def _check_text(text: str, path: StatePath) -> None:
    if not text.isascii() and _SURROGATE_PAIR.search(text):
        raise ValueError(
            f"{describe(path)} is or has a key with two surrogates that JSON reads as one character: {text!r}"
        )


def _item(item: Node) -> tuple[str | int, Node]:
    match item:
        case [str() | int() as key, value] if not isinstance(key, bool):
            return key, value
        case [{"int": str(digits)}, value]:
            return int(digits, 16), value
        case _:
            raise ValueError(f"unknown item {str(item)[:80]} of a dict")


def _encode_int(value: int) -> Node:
    if abs(value) > _MAX_PLAIN_INT:
        return {"int": hex(value)}
    return int(value)


def encode_numpy_scalar(value: Any) -> Node:
    """Return the node of a numpy scalar: its type as numpy spells it and its bytes, little-endian."""
    stored = value.dtype.newbyteorder("<")
    return {"numpy_scalar": [stored.str, value.astype(stored).tobytes().hex()]}


def _numpy_scalar(dtype: str, digits: str) -> object:
    import numpy as np

    data = bytes.fromhex(digits)
    if not _NUMPY_SCALAR.fullmatch(dtype) or len(data) != np.dtype(dtype).itemsize:
        raise ValueError(f"{len(data)} bytes are no numpy scalar of type {dtype[:80]!r}")
    return np.frombuffer(data, dtype)[0]


def _set_of(items: list[State]) -> set[State]:
    try:
        members = set(items)
    except TypeError as error:
        raise ValueError(f"a set holds what cannot be in one: {error}") from error
    if len(members) != len(items):
        raise ValueError("a set holds an item twice")
    return members


def _float_of_bits(bits: str) -> float:
    try:
        return struct.unpack(">d", bytes.fromhex(bits.removeprefix("0x")))[0]
    except struct.error as error:
        raise ValueError(f"float_bits {bits!r} are not 64 bits") from error
