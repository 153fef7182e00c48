"""What goes in comes out, to the bit."""

import enum
import math
import re
import struct
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from gcore_ckpt import Checkpointer, CheckpointWriteError, Shard, verify
from gcore_ckpt.format.boxes import DTYPES

NUMPY_DTYPES = [name for name, dtype in DTYPES.items() if dtype.in_numpy]


def bits(tensor: torch.Tensor) -> bytes:
    dense = torch.empty(tensor.nbytes, dtype=torch.uint8)
    dense.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return dense.numpy().tobytes()


def assert_same(found: Any, expected: Any) -> None:
    """Equal in type, structure, order, dtype, shape and every bit."""
    assert type(found) is type(expected)
    match expected:
        case dict():
            assert [(type(key), key) for key in found] == [(type(key), key) for key in expected]
            for key in found:
                assert_same(found[key], expected[key])
        case list() | tuple():
            assert len(found) == len(expected)
            for item, expected_item in zip(found, expected, strict=True):
                assert_same(item, expected_item)
        case torch.Tensor():
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert bits(found) == bits(expected)
        case np.ndarray():
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert found.tobytes() == expected.tobytes()
        case np.generic():
            assert found.dtype == expected.dtype
            assert found.tobytes() == expected.tobytes()
        case float():
            assert struct.pack("d", found) == struct.pack("d", expected)
        case _:
            assert found == expected


def round_trip(state: Any) -> Any:
    with tempfile.TemporaryDirectory() as path, Checkpointer(path) as checkpointer:
        checkpointer.save(0, state).wait()
        verify(path)
        return checkpointer.load()


def storage(draw: st.DrawFn, dtype: str, count: int) -> bytearray:
    data = draw(st.randoms(use_true_random=False)).randbytes(count * DTYPES[dtype].size_bytes)
    return bytearray(byte & 1 for byte in data) if dtype == "bool" else bytearray(data)


shapes = st.lists(st.integers(0, 4), max_size=4)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    shape = draw(shapes)
    steps = [draw(st.integers(1, 3)) for _ in shape]
    whole = [extent * step for extent, step in zip(shape, steps, strict=True)]
    offset = draw(st.integers(0, 3))
    data = storage(draw, dtype, math.prod(whole) + offset + 1)
    flat = torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, dtype))
    tensor = flat[offset : offset + math.prod(whole)].view(whole)
    tensor = tensor[tuple(slice(None, None, step) for step in steps)]
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    return tensor.unsqueeze(0).expand(2, *tensor.shape) if draw(st.booleans()) else tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, np.dtype[Any]]:
    dtype = draw(st.sampled_from(NUMPY_DTYPES))
    shape = draw(shapes)
    array = np.frombuffer(storage(draw, dtype, math.prod(shape)), dtype=dtype).reshape(shape)
    steps = [slice(None, None, draw(st.sampled_from([1, -1, 2]))) for _ in shape]
    array = array[(*steps, ...)].transpose(draw(st.permutations(range(len(shape)))))
    array.flags.writeable = False
    return array


SURROGATE_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def texts(max_size: int | None = None) -> st.SearchStrategy[str]:
    return st.text(st.characters(), max_size=max_size).filter(
        lambda text: not SURROGATE_PAIR.search(text)
    )


@st.composite
def numpy_scalars(draw: st.DrawFn) -> np.generic:
    """Of every type that comes back as itself; a float64 is a Python float, and comes back as one."""
    kinds = [
        "?",
        "i1",
        "i2",
        "i4",
        "i8",
        "u1",
        "u2",
        "u4",
        "u8",
        "f2",
        "f4",
        "c8",
        "c16",
        "M8[ns]",
        "M8[25s]",
        "m8[D]",
    ]
    dtype = np.dtype(draw(st.sampled_from(kinds)))
    data = draw(st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize))
    return np.frombuffer(data if dtype != np.bool_ else bytes([data[0] & 1]), dtype)[0]


leaves = st.one_of(
    tensors(),
    arrays(),
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**50, max_value=2**200),
    st.floats(allow_nan=True, allow_infinity=True),
    texts(),
    st.binary(max_size=20),
    numpy_scalars(),
    st.sets(
        st.one_of(
            st.none(), st.integers(), texts(), st.binary(max_size=4), st.frozensets(st.integers())
        )
    ),
    st.frozensets(st.tuples(texts(2), st.floats(allow_nan=False))),
)
keys = st.one_of(
    texts(4), st.sampled_from(["a", "b", "a.b", "1", 1, "-1", -1, "0x1", "None"]), st.integers()
)
states = st.recursive(
    leaves,
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.dictionaries(keys, children, max_size=5),
    ),
    max_leaves=12,
)


@settings(max_examples=80)
@given(states)
def test_random_states(state: Any) -> None:
    assert_same(round_trip(state), state)


@settings(max_examples=50)
@given(st.dictionaries(texts(4), st.one_of(tensors(), arrays()), min_size=1, max_size=6))
def test_random_tensors_open_in_safetensors(state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as path:
        with Checkpointer(path) as checkpointer:
            checkpointer.save(7, state).wait()
            assert_same(checkpointer.load(), state)
        stored = load_file(Path(path, "step-00000007", "data-00000.safetensors"))
    assert sorted(map(bits, stored.values())) == sorted(
        bits(x) if isinstance(x, torch.Tensor) else x.tobytes() for x in state.values()
    )


def test_data_file_has_the_names_of_the_tree(tmp_path: Path) -> None:
    model, optim = torch.nn.Linear(3, 2), torch.ones(2, dtype=torch.bfloat16)
    state = {
        "model": model.state_dict(),
        "optim": [{"exp_avg": optim}],
        "a.b": np.arange(3),
        "a": {"b": np.zeros(2)},
    }
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(12, state)
    with safe_open(tmp_path / "step-00000012" / "data-00000.safetensors", "pt") as file:
        assert set(file.keys()) == {"model.weight", "model.bias", "optim.0.exp_avg", "a.b", "a.b#2"}
        assert torch.equal(file.get_tensor("model.weight"), model.weight)
        assert torch.equal(file.get_tensor("optim.0.exp_avg"), optim)
        assert file.metadata() == {"format": "pt"}


def test_bare_tensor_reserved_name_and_text_that_is_not_unicode() -> None:
    assert_same(
        round_trip({"\ud800": torch.arange(3), "s": "\udfff"}),
        {"\ud800": torch.arange(3), "s": "\udfff"},
    )
    assert_same(round_trip(torch.arange(3)), torch.arange(3))
    assert_same(round_trip({"__metadata__": torch.arange(3)}), {"__metadata__": torch.arange(3)})


def test_views_of_the_same_memory_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    embedding, array = torch.randn(1000, 16), np.zeros(1000)
    state = {
        "embed": embedding,
        "lm_head": embedding.view(1000, 16),
        "transposed": embedding.T,
        "arrays": (array, array),
    }
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, state)
    loaded = checkpointer.load()
    assert_same(loaded, state)
    assert loaded["embed"] is loaded["lm_head"]
    assert loaded["embed"].data_ptr() == loaded["transposed"].data_ptr()
    assert loaded["arrays"][0] is loaded["arrays"][1]
    size_bytes = (tmp_path / "step-00000000" / "data-00000.safetensors").stat().st_size
    assert size_bytes < embedding.nbytes + array.nbytes + 1000


class Color(enum.IntEnum):
    RED = 3


class Point(NamedTuple):
    x: int
    y: float


class Span(NamedTuple("Span", [("first", int), ("last", int)])):
    """Made from text."""

    def __new__(cls, text: str) -> "Span":
        first, last = map(int, text.split("-"))
        return super().__new__(cls, first, last)


def test_a_named_tuple_may_be_made_from_other_values() -> None:
    tensor = torch.ones(2)
    assert_same(round_trip({"span": Span("3-5"), "x": tensor}), {"span": (3, 5), "x": tensor})


def test_subclasses_come_back_as_what_they_equal() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    state = {
        "o": OrderedDict(a=1),
        "n": Point(1, 2.0),
        "e": Color.RED,
        "f": np.float64(0.1),
        "p": parameter,
    }
    loaded = round_trip(state)
    expected = {"o": {"a": 1}, "n": (1, 2.0), "e": 3, "f": 0.1, "p": torch.ones(2)}
    assert_same(loaded, expected)


def test_conjugate_view_and_numbers_too_long_for_decimal_digits() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j]).conj()
    state = {"conj": tensor, "plain": tensor.conj(), "int": -(3**20_000)}
    assert_same(
        round_trip(state),
        {"conj": tensor.resolve_conj(), "plain": tensor.conj(), "int": -(3**20_000)},
    )


def test_mutation_after_save_changes_nothing(tmp_path: Path) -> None:
    tensor, array, numbers = torch.zeros(300_000), np.zeros(1000), [1, 2]
    with Checkpointer(tmp_path, max_in_flight=2) as checkpointer:
        for step in range(6):
            tensor.fill_(step)
            array.fill(step)
            numbers[0] = step
            checkpointer.save(step, {"tensor": tensor, "array": array, "numbers": numbers})
            tensor.fill_(-1)
            array.fill(-1)
            numbers.append(-1)
        checkpointer.wait()
        for step in range(6):
            loaded = checkpointer.load(step=step)
            assert (loaded["tensor"] == step).all()
            assert (loaded["array"] == step).all()
            assert loaded["numbers"] == [step, 2, *[-1] * step]


class Name(str, enum.Enum):  # noqa: UP042  # its str() is not its value
    WEIGHT = "weight"


class PlainName(enum.StrEnum):
    WEIGHT = "weight"


class Text(str):
    __slots__ = ()


class Same(str):
    """Equals nothing but itself: two of them are two keys of a dict, and one text."""

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__


@pytest.mark.parametrize(
    "key",
    [
        Name.WEIGHT, PlainName.WEIGHT, Text("weight"), Same("weight"), np.str_("weight"), Color.RED, True, False,
        np.int64(1), np.bool_(True), 1.0, None, b"weight", (1,), "\ud800\udc00",
    ],
    ids=lambda key: f"{type(key).__name__}",
)  # fmt: skip
@pytest.mark.parametrize(
    "other", [{}, {"w": 2, 7: 3}, {Same("weight"): 2, 7: 3}], ids=["alone", "more", "same"]
)
def test_a_key_that_would_not_come_back_as_it_is_is_refused(
    tmp_path: Path, key: Any, other: dict[Any, Any]
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(
            (TypeError, ValueError), match=r"^state\['model'\] (has the key|is or has a key with)"
        ):
            checkpointer.save(1, {"model": {**other, key: torch.ones(1)}})
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_keys_that_look_alike_stay_apart() -> None:
    state = {
        1: torch.ones(1),
        "1": torch.zeros(1),
        "01": 2,
        -1: "x",
        "-1": "y",
        2**60: 1,
        "0x1": 3,
        "": 4,
        "True": 5,
    }
    assert_same(round_trip(state), state)


def shard(value: float, name: str | None = None) -> Shard:
    return Shard(global_shape=(1,), offset=(0,), tensor=torch.tensor([value]), name=name)


@pytest.mark.parametrize(
    "state",
    [
        {"a": shard(1.0, "w"), "w": torch.zeros(1)},
        {"w": torch.zeros(1), "a": shard(1.0, "w")},
        {"w": 3, "a": shard(1.0, "w")},
        {"a": shard(1.0, "w"), "w": 3},
        {"w": torch.zeros(1), "deeper": {"a": shard(1.0, "w")}},
    ],
)
def test_a_shard_whose_name_is_that_of_another_entry_is_refused(tmp_path: Path, state: Any) -> None:
    with (
        Checkpointer(tmp_path) as checkpointer,
        pytest.raises(ValueError, match=r"keys 'a' and 'w'|'w' and 'a'|name"),
    ):
        checkpointer.save(1, state)


def test_a_tensor_is_not_given_the_name_of_a_shard(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"deeper": {"a": shard(1.0, "w")}, "w": torch.zeros(1)})
    assert_same(checkpointer.load(), {"deeper": {"w": torch.ones(1)}, "w": torch.zeros(1)})


cyclic: list[Any] = []
cyclic.append(cyclic)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"optim": {"state": {None: 1}}},
            r"state\['optim'\]\['state'\] has the key None of type NoneType; dict keys must be",
        ),
        (
            {"a": [bytearray(2)]},
            r"state\['a'\]\[0\] is a builtins.bytearray; a state holds dict, list, tuple, set, ",
        ),
        ({"a": {torch.ones(2)}}, r"state\['a'\]\['item'\] is a torch.Tensor; a state holds"),
        ({"a": np.void(b"ab")}, r"state\['a'\] is a numpy.void; a state holds"),
        ({"a": np.array(["x"])}, r"state\['a'\] has dtype <U1; expected one of bool, uint8, "),
        ({"a": np.zeros(2, ">f4")}, r"state\['a'\] has dtype >f4; expected one of"),
        (
            {"a": np.ma.masked_array([1])},
            r"state\['a'\] is a MaskedArray; expected a plain numpy.ndarray",
        ),
        (
            {"a": torch.zeros(2, device="meta")},
            r"state\['a'\] has layout torch.strided on device meta; expected a dense",
        ),
        (
            {"a": torch.eye(2).to_sparse()},
            r"state\['a'\] has layout torch.sparse_coo on device cpu; expected a dense",
        ),
        (
            {"a": torch.empty(2, dtype=torch.bits8)},
            r"has dtype torch.bits8; expected one of",
        ),
        (
            {"a": cyclic},
            r"state\['a'\]\[0\]\[0\]\.\.\. nests more than 100 containers, or contains itself",
        ),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path: Path, state: Any, message: str) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises((TypeError, ValueError), match=message):
            checkpointer.save(0, state)
        checkpointer.save(0, {}).wait()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_on_a_cuda_device(tmp_path: Path) -> None:
    tensor = torch.randn(1000, 64, device="cuda")
    expected = {"x": tensor.cpu(), "strided": tensor.T[::2].cpu()}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, {"x": tensor, "strided": tensor.T[::2]})
        tensor.zero_()
        checkpointer.wait()
        assert_same(checkpointer.load(), expected)


def test_what_a_load_would_refuse_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Level(enum.Enum):
        LOW = 1

    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, {"seen": {1, 2}}).wait()
        with pytest.raises(
            CheckpointWriteError, match=r"saving step 2 .* a set holds an item twice"
        ):
            checkpointer.save(2, {"seen": {1, Level.LOW}}).wait()
        for module in ("saving.saver", "storage.local"):
            monkeypatch.setattr(f"gcore_ckpt.{module}.MAX_INDEX_BYTES", 10_000)
        with pytest.raises(
            CheckpointWriteError,
            match=r"index.json has \d+ bytes; expected at most 10000: it holds all",
        ):
            checkpointer.save(3, {"blob": bytes(10_000)}).wait()
        assert checkpointer.load() == {"seen": {1, 2}}
