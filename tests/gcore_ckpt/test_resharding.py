"""What any number of ranks has saved in any sharding, any number of ranks loads in any other, to the bit."""

import math
import os
import tempfile
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("GCORE_CKPT_EXAMPLES", "60"))

MESHES = [(1,), (2,), (3,), (4,), (2, 2), (1, 2), (2, 1), (1, 3), (1, 4), (4, 1)]
NUMPY_DTYPES = ["bool", "uint8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64"]
DTYPES = [*NUMPY_DTYPES, "bfloat16", "float8_e4m3fn", "float8_e5m2"]


class RankPool(Protocol):
    def run(self, function: str, *arguments: object, size: int, timeout_s: float = 60) -> list[Any]: ...
    def errors(self, function: str, *arguments: object, size: int, timeout_s: float = 60) -> list[str]: ...


class RankServer(Protocol):
    def shared(self) -> RankPool: ...


def tensor(name: str, shape: Sequence[int], layout: tuple[Any, ...], **fields: Any) -> SimpleNamespace:
    """A described tensor; see reshard_cases.py."""
    defaults = {"dtype": "float32", "seed": len(name), "wrapped": layout[0] == "boxes", "strided": False, "meta": False}
    return SimpleNamespace(
        **defaults | {"kind": "tensor", "name": name, "shape": tuple(shape), "layout": layout} | fields
    )


@st.composite
def splits(draw: st.DrawFn, extent: int) -> list[tuple[int, int]]:
    """Cuts a dimension into (start, extent), some of them empty."""
    cuts = sorted(draw(st.lists(st.integers(0, extent), max_size=3)))
    return [(start, stop - start) for start, stop in zip([0, *cuts], [*cuts, extent], strict=True)]


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...], size: int) -> list[list[Any]]:
    """The boxes of each rank: an uneven grid, each cell held by one rank or more."""
    cells: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for extent in shape:
        parts = draw(splits(extent))
        cells = [((*offset, start), (*box, length)) for offset, box in cells for start, length in parts]
    held: list[list[Any]] = [[] for _ in range(size)]
    for cell in cells:
        for rank in draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=2)):
            held[rank].append(cell)
    return held


@st.composite
def single_boxes(draw: st.DrawFn, shape: tuple[int, ...], size: int) -> list[list[Any]]:
    """Any box for each rank, as a load may ask for."""
    boxes: list[list[Any]] = []
    for _ in range(size):
        offset = tuple(draw(st.integers(0, extent)) for extent in shape)
        boxes.append([(offset, tuple(draw(st.integers(0, e - o)) for e, o in zip(shape, offset, strict=True)))])
    return boxes


@st.composite
def rows(draw: st.DrawFn, shape: tuple[int, ...], size: int) -> list[list[Any]]:
    """One box for each rank, which together are the whole."""
    if not shape:
        return [[((), ())]] * size
    cuts = sorted(draw(st.integers(0, shape[0])) for _ in range(size - 1))
    bounds = zip([0, *cuts], [*cuts, shape[0]], strict=True)
    return [[((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))] for start, stop in bounds]


@st.composite
def layouts(draw: st.DrawFn, dtype: str, shape: tuple[int, ...], size: int, *, wrapped: bool, load: bool) -> Any:
    kinds = ["plain", "dtensor", "dtensor", "box"] + ["boxes"] * 2 * wrapped
    kind = draw(st.sampled_from(kinds + ["array"] * (dtype in NUMPY_DTYPES)))
    if kind in ("plain", "array"):
        ranks = st.sets(st.integers(0, size - 1), min_size=1) if wrapped else st.just(set(range(size)))
        return kind, draw(ranks)
    if kind == "dtensor":
        mesh = draw(st.sampled_from([mesh for mesh in MESHES if math.prod(mesh) <= size]))
        choices = ["R", *(f"S{dim}" for dim in range(len(shape)))]
        return kind, mesh, [draw(st.sampled_from(choices)) for _ in mesh]
    if kind == "box":
        return kind, draw(single_boxes(shape, size) if load else rows(shape, size))
    return kind, draw(grids(shape, size))


small_values = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=4)
)
keys = st.one_of(st.sampled_from(["a", "b", "a.b", "weight"]), st.integers(-3, 2**60))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """What `save_size` ranks save, and as what `load_size` ranks load it."""
    save_size, load_size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    count = 0

    @st.composite
    def leaf(draw: st.DrawFn) -> Any:
        nonlocal count
        if draw(st.integers(0, 4)) == 0:
            return draw(small_values)
        count += 1
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 7, 9]), max_size=3)))
        wrapped = draw(st.booleans())
        return SimpleNamespace(
            kind="tensor",
            name=f"t{count}",
            dtype=dtype,
            shape=shape,
            seed=draw(st.integers(0, 2**32)),
            wrapped=wrapped,
            strided=draw(st.booleans()),
            layout=draw(layouts(dtype, shape, save_size, wrapped=wrapped, load=False)),
            load_strided=draw(st.booleans()),
            load_layout=draw(layouts(dtype, shape, load_size, wrapped=wrapped, load=True)),
            load_meta=draw(st.integers(0, 3)) == 0,
        )

    trees = st.recursive(
        leaf(),
        lambda children: st.one_of(
            st.lists(children, max_size=3),
            st.lists(children, max_size=3).map(tuple),
            st.dictionaries(keys, children, max_size=4),
        ),
        max_leaves=8,
    )
    own = {
        "values": SimpleNamespace(kind="per_rank", values=draw(st.lists(small_values, min_size=4, max_size=4))),
        "rng": SimpleNamespace(kind="per_rank", dtype="uint8", shape=(5,), seed=1, strided=False),
    }
    return {
        "save_size": save_size,
        "load_size": load_size,
        "tree": {"tree": draw(trees), "own": own},
        "staging": draw(st.sampled_from(["full", "full", "chunked"])),
        "block_bytes": draw(st.sampled_from([None, 8, 16, 64])),
        "chunk_bytes": draw(st.sampled_from([32, 100, 1000])),
    }


def as_template(tree: Any) -> Any:
    """The described state in the layout in which it is loaded."""
    match tree:
        case dict():
            return {key: as_template(value) for key, value in tree.items()}
        case list():
            return [as_template(item) for item in tree]
        case tuple():
            return tuple(as_template(item) for item in tree)
        case SimpleNamespace(kind="tensor"):
            fields = vars(tree)
            meta = fields["load_meta"] and fields["load_layout"][0] != "array"
            loaded = {"layout": fields["load_layout"], "strided": fields["load_strided"], "meta": meta}
            return SimpleNamespace(**fields | loaded)
        case _:
            return tree


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases())
def test_any_state_in_any_sharding(rank_server: RankServer, case: dict[str, Any]) -> None:
    ranks = rank_server.shared()
    tree, load_size = case["tree"], case["load_size"]
    same_size = case["save_size"] == load_size
    with tempfile.TemporaryDirectory() as path:
        options = {"staging": case["staging"]}
        sizes = case["block_bytes"], case["chunk_bytes"]
        ranks.run("save", path, 3, tree, case["save_size"], options, *sizes, size=case["save_size"])
        template = as_template(tree if same_size else {"tree": tree["tree"]})
        assert ranks.run("load_template", path, template, load_size, size=load_size) == [[]] * load_size
        parts = tree if same_size else {"tree": tree["tree"]}
        only = None if same_size else ["tree"]
        assert ranks.run("load_whole", path, parts, load_size, only, size=load_size) == [[]] * load_size
