"""What any number of ranks has saved in any sharding, any number of ranks loads in any other, to the bit."""

import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gcore_ckpt import Checkpointer, export_hf

EXAMPLES = int(os.environ.get("GCORE_CKPT_EXAMPLES", "60"))

MESHES = [(1,), (2,), (3,), (4,), (2, 2), (1, 2), (2, 1), (1, 3), (1, 4), (4, 1)]
NUMPY_DTYPES = [
    "bool",
    "uint8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
]
DTYPES = [*NUMPY_DTYPES, "bfloat16", "float8_e4m3fn", "float8_e5m2"]


class RankPool(Protocol):
    def run(
        self, function: str, *arguments: object, size: int, timeout_s: float = 60
    ) -> list[Any]: ...
    def errors(
        self, function: str, *arguments: object, size: int, timeout_s: float = 60
    ) -> list[str]: ...


class RankServer(Protocol):
    def shared(self) -> RankPool: ...


def tensor(
    name: str, shape: Sequence[int], layout: tuple[Any, ...], **fields: Any
) -> SimpleNamespace:
    """A described tensor; see reshard_cases.py."""
    defaults = {
        "dtype": "float32",
        "seed": len(name),
        "wrapped": layout[0] == "boxes",
        "strided": False,
        "meta": False,
    }
    return SimpleNamespace(
        **defaults
        | {"kind": "tensor", "name": name, "shape": tuple(shape), "layout": layout}
        | fields
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
        cells = [
            ((*offset, start), (*box, length)) for offset, box in cells for start, length in parts
        ]
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
        boxes.append(
            [
                (
                    offset,
                    tuple(draw(st.integers(0, e - o)) for e, o in zip(shape, offset, strict=True)),
                )
            ]
        )
    return boxes


@st.composite
def rows(draw: st.DrawFn, shape: tuple[int, ...], size: int) -> list[list[Any]]:
    """One box for each rank, which together are the whole."""
    if not shape:
        return [[((), ())]] * size
    cuts = sorted(draw(st.integers(0, shape[0])) for _ in range(size - 1))
    bounds = zip([0, *cuts], [*cuts, shape[0]], strict=True)
    return [
        [((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))] for start, stop in bounds
    ]


@st.composite
def layouts(
    draw: st.DrawFn,
    dtype: str,
    shape: tuple[int, ...],
    size: int,
    *,
    wrapped: bool,
    named: bool,
    load: bool,
) -> Any:
    kinds = ["plain", "dtensor", "dtensor", "box"] + ["boxes"] * 2 * named
    kind = draw(st.sampled_from(kinds + ["array"] * (dtype in NUMPY_DTYPES)))
    if kind in ("plain", "array"):
        ranks = (
            st.sets(st.integers(0, size - 1), min_size=1) if wrapped else st.just(set(range(size)))
        )
        return kind, draw(ranks)
    if kind == "dtensor":
        # DTensor.from_local cannot say that a tensor has no dimensions to a rank outside its mesh.
        smallest = 1 if shape else size
        mesh = draw(
            st.sampled_from([mesh for mesh in MESHES if smallest <= math.prod(mesh) <= size])
        )
        choices = ["R", *(f"S{dim}" for dim in range(len(shape)))]
        return kind, mesh, [draw(st.sampled_from(choices)) for _ in mesh]
    if kind == "box":
        return kind, draw(single_boxes(shape, size) if load else rows(shape, size))
    return kind, draw(grids(shape, size))


small_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=4),
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
        saved = draw(layouts(dtype, shape, save_size, wrapped=wrapped, named=wrapped, load=False))
        named = saved[0] == "boxes"
        return SimpleNamespace(
            kind="tensor",
            name=f"t{count}",
            dtype=dtype,
            shape=shape,
            seed=draw(st.integers(0, 2**32)),
            wrapped=wrapped,
            strided=draw(st.booleans()),
            layout=saved,
            load_strided=draw(st.booleans()),
            load_layout=draw(
                layouts(dtype, shape, load_size, wrapped=wrapped, named=named, load=True)
            ),
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
        "values": SimpleNamespace(
            kind="per_rank", values=draw(st.lists(small_values, min_size=4, max_size=4))
        ),
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
            loaded = {
                "layout": fields["load_layout"],
                "strided": fields["load_strided"],
                "meta": meta,
            }
            return SimpleNamespace(**fields | loaded)
        case _:
            return tree


@pytest.mark.slow
@settings(max_examples=EXAMPLES)
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
        assert (
            ranks.run("load_template", path, template, load_size, size=load_size)
            == [[]] * load_size
        )
        parts = tree if same_size else {"tree": tree["tree"]}
        only = None if same_size else ["tree"]
        assert (
            ranks.run("load_whole", path, parts, load_size, only, size=load_size)
            == [[]] * load_size
        )


ROWS_OF_4 = ("dtensor", (4,), ["S0"])
ALL = {0, 1, 2, 3}


def data_bytes(path: Path, step: int) -> dict[str, int]:
    """Bytes of data, headers not counted, in each file of a step."""
    found: dict[str, int] = {}
    for file in sorted((path / f"step-{step:08d}").glob("*.safetensors")):
        content = file.read_bytes()
        found[file.name] = len(content) - 8 - int.from_bytes(content[:8], "little")
    return found


@pytest.mark.parametrize(
    ("saved", "loaded"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("int32", "float64")]
)
def test_dtype_changes_on_load(ranks: RankPool, tmp_path: Path, saved: str, loaded: str) -> None:
    leaf = tensor("x", (10, 7), ROWS_OF_4, dtype=saved, finite=True)
    ranks.run("save", str(tmp_path), 1, {"x": leaf}, 4, {}, size=4)
    columns = SimpleNamespace(**vars(leaf) | {"layout": ("dtensor", (3,), ["S1"])})
    assert ranks.run("load_as", str(tmp_path), columns, loaded, 3, size=3) == [True] * 3


def test_a_part_of_the_names(ranks: RankPool, tmp_path: Path) -> None:
    names = {name: tensor(name, (5, 3), ROWS_OF_4) for name in ("weight", "bias", "scale")}
    ranks.run(
        "save",
        str(tmp_path),
        1,
        {"model": names, "optim": [names["scale"]], "step": 1},
        4,
        {},
        size=4,
    )
    columns = {"weight": tensor("weight", (5, 3), ("dtensor", (2,), ["S1"]))}
    assert ranks.run("load_template", str(tmp_path), {"model": columns}, 2, size=2) == [[], []]
    part = {"model": {"bias": names["bias"]}, "optim": [names["scale"]]}
    assert ranks.run("load_whole", str(tmp_path), part, 2, ["model.bias", "optim"], size=2) == [
        [],
        [],
    ]


def test_meta_tensors_become_new_ones(ranks: RankPool, tmp_path: Path) -> None:
    layouts_of = {
        "dtensor": ("dtensor", (2,), ["S1"]),
        "plain": ("plain", ALL),
        "box": ("box", [[((0, 1), (3, 2))], [((2, 0), (2, 3))]]),
    }
    saved = {name: tensor(name, (5, 3), ROWS_OF_4) for name in layouts_of}
    ranks.run("save", str(tmp_path), 1, saved, 4, {}, size=4)
    template = {
        name: tensor(name, (5, 3), layout, meta=True) for name, layout in layouts_of.items()
    }
    assert ranks.run("load_template", str(tmp_path), template, 2, size=2) == [[], []]


def test_replicas_are_written_once_and_by_turns(ranks: RankPool, tmp_path: Path) -> None:
    tree = {
        f"t{n}": tensor(f"t{n}", (4 * n, 16), layout)
        for n in range(1, 12)
        for layout in [[("plain", ALL), ("array", ALL), ("dtensor", (2, 2), ["R", "S0"])][n % 3]]
    }
    ranks.run("save", str(tmp_path), 1, tree, 4, {}, size=4)
    sizes = [math.prod(leaf.shape) * 4 for leaf in tree.values()]
    written = data_bytes(tmp_path, 1)
    assert sum(written.values()) == sum(sizes)
    assert len(written) == 4
    assert max(written.values()) <= sum(sizes) / 4 + max(sizes)
    assert ranks.run("load_whole", str(tmp_path), tree, 4, None, size=4) == [[]] * 4


def test_plan_is_kept_until_a_rank_holds_something_else(ranks: RankPool, tmp_path: Path) -> None:
    first = {
        "w": tensor("w", (9, 4), ROWS_OF_4),
        "replica": tensor("replica", (50,), ("plain", ALL)),
    }
    second = {
        "w": tensor("w", (9, 4), ROWS_OF_4, seed=77),
        "replica": tensor("replica", (50,), ("plain", ALL), seed=8),
    }
    only_on_1 = {"extra": tensor("extra", (6,), ("plain", {1}), wrapped=True)}
    steps = {1: first, 2: second, 3: second | only_on_1, 4: first | only_on_1, 5: first}
    remade = ranks.run("save_each", str(tmp_path), steps, 4, {}, size=4)
    assert remade == [[True, False, True, False, True]] * 4
    for step, tree in reversed(steps.items()):
        assert ranks.run("load_whole", str(tmp_path), tree, 2, None, size=2) == [[], []]
        shutil.rmtree(tmp_path / f"step-{step:08d}")


def test_chunked_staging_saves_the_same(ranks: RankPool, tmp_path: Path) -> None:
    tree = {
        f"t{n}": tensor(f"t{n}", (n, 100), layout)
        for n, layout in enumerate([ROWS_OF_4, ("plain", ALL)] * 6)
    }
    for staging in ("full", "chunked"):
        path = tmp_path / staging
        ranks.run("save", str(path), 1, tree, 4, {"staging": staging}, None, 1000, size=4)
        assert ranks.run("load_whole", str(path), tree, 3, None, size=3) == [[]] * 3
    chunks = data_bytes(tmp_path / "chunked", 1)
    assert sum(chunks.values()) == sum(data_bytes(tmp_path / "full", 1).values())
    assert max(chunks.values()) <= 1000
    assert len(chunks) >= sum(chunks.values()) / 1000


def inodes(path: Path, step: int) -> dict[int, int]:
    """Links of each data file, by its inode."""
    files = (path / f"step-{step:08d}").glob("*.safetensors")
    return {status.st_ino: status.st_nlink for status in (file.stat() for file in files)}


def test_incremental_saves_link_what_has_not_changed(ranks: RankPool, tmp_path: Path) -> None:
    def at(step: int, layout: tuple[Any, ...]) -> dict[str, Any]:
        return {
            "frozen": tensor("frozen", (64, 100), layout),
            "replica": tensor("replica", (10, 100), ("plain", ALL)),
            "trained": tensor("trained", (8, 10), layout, seed=step),
        }

    options = {"incremental": True, "keep": 2}
    steps = {step: at(step, ROWS_OF_4) for step in (1, 2)}
    ranks.run("save_each", str(tmp_path), steps, 4, options, size=4)
    linked = inodes(tmp_path, 1).keys() & inodes(tmp_path, 2).keys()
    assert len(linked) == 4
    assert all(inodes(tmp_path, 1)[inode] == 2 for inode in linked)
    assert (
        sum(data_bytes(tmp_path, 2).values()) == sum(data_bytes(tmp_path, 1).values()) + 8 * 10 * 4
    )

    ranks.run(
        "save", str(tmp_path), 3, at(3, ROWS_OF_4), 4, options, size=4
    )  # by a new Checkpointer
    assert linked <= inodes(tmp_path, 3).keys()
    ranks.run("save", str(tmp_path), 4, at(4, ROWS_OF_4), 4, options, size=4)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [
        "step-00000003",
        "step-00000004",
    ]
    for step, size in ((4, 3), (4, 1)):
        assert (
            ranks.run("load_whole", str(tmp_path), at(step, ROWS_OF_4), size, None, size=size)
            == [[]] * size
        )

    rows_of_3 = ("dtensor", (3,), ["S0"])
    ranks.run("save", str(tmp_path), 5, at(5, rows_of_3), 3, options, size=3)
    assert not linked <= inodes(tmp_path, 5).keys()
    assert ranks.run("load_whole", str(tmp_path), at(5, rows_of_3), 4, None, size=4) == [[]] * 4
    ranks.run("save", str(tmp_path), 6, at(6, rows_of_3), 3, options, size=3)
    assert len(inodes(tmp_path, 5).keys() & inodes(tmp_path, 6).keys()) == 3
    ranks.run("save", str(tmp_path), 7, at(7, ROWS_OF_4), 4, options, size=4)
    assert ranks.run(
        "load_template", str(tmp_path), at(7, ("dtensor", (2,), ["S1"])), 2, size=2
    ) == [[], []]


@pytest.mark.parametrize("size", [2, 3])
def test_a_load_reads_what_it_needs(ranks: RankPool, tmp_path: Path, size: int) -> None:
    block_bytes, rows, row_bytes = 1024, 1001, 40
    ranks.run(
        "save",
        str(tmp_path),
        1,
        {"w": tensor("w", (rows, 10), ROWS_OF_4)},
        4,
        {},
        block_bytes,
        size=4,
    )
    template = {"w": tensor("w", (rows, 10), ("dtensor", (size,), ["S0"]))}
    headers = sum(f.stat().st_size for f in tmp_path.glob("*/*.safetensors")) - sum(
        data_bytes(tmp_path, 1).values()
    )
    for read in ranks.run("bytes_read_by_load", str(tmp_path), template, size, size=size):
        needed = math.ceil(rows / size) * row_bytes
        assert read <= headers + needed + 4 * 2 * block_bytes
        assert read >= rows // size * row_bytes - row_bytes * size


def test_fsdp_training_continues_with_other_numbers_of_ranks(
    ranks: RankPool, tmp_path: Path
) -> None:
    saved, uninterrupted = ranks.run("train_fsdp_and_save", str(tmp_path), 4, 3, size=4)[0]
    for size in (1, 2, 3):
        for loaded, continued in ranks.run(
            "load_and_train_fsdp", str(tmp_path), size, 3, size=size
        ):
            for name, parameter in saved.items():
                assert torch.equal(loaded[name], parameter)
                torch.testing.assert_close(continued[name], uninterrupted[name], rtol=0, atol=1e-6)
                assert not torch.equal(continued[name], parameter)


def test_transformers_loads_what_four_ranks_have_saved(ranks: RankPool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    ranks.run(
        "save_fsdp_of_transformers", str(tmp_path / "model"), str(tmp_path / "ckpt"), 4, size=4
    )
    export_hf(tmp_path / "ckpt", tmp_path / "hf", prefix="model", config_from=tmp_path / "model")

    tokens = torch.arange(12).view(2, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    saved = Checkpointer(tmp_path / "ckpt").load()["model"]
    for name, parameter in exported.state_dict().items():
        assert torch.equal(parameter, saved[name])
        torch.testing.assert_close(parameter, model.state_dict()[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(exported(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [8, 6])
def test_fsdp_over_tensor_parallelism(ranks: RankPool, tmp_path: Path, rows: int) -> None:
    placements = ranks.run("save_fsdp_over_tp", str(tmp_path), rows, size=4)
    assert all("_StridedShard" in placement for placement in placements)
    for found in ranks.run("load_plain", str(tmp_path), 3, size=3):
        assert torch.equal(found["weight"], torch.arange(rows * 3.0).view(rows, 3))
        assert torch.equal(found["bias"], torch.arange(float(rows)))


@pytest.mark.parametrize("size", [1, 3])
def test_megatron_sharded_tensors(ranks: RankPool, tmp_path: Path, size: int) -> None:
    ranks.run("save_megatron", str(tmp_path), 2, size=2)
    assert ranks.run("load_megatron", str(tmp_path), size, size=size) == [[True] * 3] * size
    [whole] = ranks.run("load_plain", str(tmp_path), 1, size=1)
    assert torch.equal(whole["model"]["layers.weight"], torch.arange(96.0).view(2, 12, 4))


@pytest.mark.parametrize("size", [1, 2])
def test_sharded_tensors_of_the_first_fsdp(ranks: RankPool, tmp_path: Path, size: int) -> None:
    ranks.run("save_fsdp1", str(tmp_path), 3, size=3)
    [whole] = ranks.run("load_plain", str(tmp_path), 1, size=1)
    assert torch.equal(whole["w"], torch.arange(24.0).view(6, 4))
    assert ranks.run("load_fsdp1", str(tmp_path), size, size=size) == [True] * size


def box(*boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> dict[str, Any]:
    """What each of three ranks holds of a tensor of shape (6, 4)."""
    return {"w": tensor("w", (6, 4), ("box", [[box] for box in boxes]))}


THIRDS = box(((0, 0), (2, 4)), ((2, 0), (2, 4)), ((4, 0), (2, 4)))
FAILURES: dict[str, tuple[list[Any], tuple[str, ...]]] = {
    "shape": (
        [{"w": tensor("w", shape, ("plain", ALL))} for shape in ((3,), (3,), (4,))],
        ("ValueError", "(3,) on rank 0", "(4,) on rank 2", "PerRank"),
    ),
    "dtype": (
        [
            {"w": tensor("w", (3,), ("plain", ALL), dtype=dtype)}
            for dtype in ("float32", "bfloat16", "float32")
        ],
        (
            "ValueError",
            "float32 and shape (3,) on rank 0",
            "bfloat16 and shape (3,) on rank 1",
            "PerRank",
        ),
    ),
    "elements": (
        [
            THIRDS | {"rng": tensor(name, (3,), ("plain", ALL))}
            for name in ("same", "same", "other")
        ],
        (
            "ValueError",
            "plain tensors differ from rank to rank",
            "'rng' (ranks 0 and 2)",
            "PerRank",
        ),
    ),
    "value": (
        [THIRDS | {"seed": seed} for seed in (5, 5, 8)],
        ("CheckpointWriteError", "state['seed'] is 5 on rank 0 and 8 on rank 2", "PerRank"),
    ),
    "overlap": (
        [box(((0, 0), (2, 4)), ((1, 0), (3, 4)), ((4, 0), (2, 4)))] * 3,
        ("ValueError", "[0:2, 0:4] and [1:4, 0:4] overlap"),
    ),
    "gap": (
        [box(((0, 0), (2, 4)), ((2, 0), (2, 3)), ((4, 0), (2, 4)))] * 3,
        ("ValueError", "its boxes have 22 of its 24 elements"),
    ),
    "unsavable": (
        [THIRDS, THIRDS, THIRDS | {"bad": 1j}],
        ("TypeError", "state['bad'] is a builtins.complex"),
    ),
    "pending sum": (
        [THIRDS | {"p": tensor("p", (4,), ("dtensor", (3,), ["P"]))}] * 3,
        ("ValueError", "state['p'] is a DTensor", "pending sum"),
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_all_ranks_hear_why_a_save_fails(ranks: RankPool, tmp_path: Path, failure: str) -> None:
    trees, expected = FAILURES[failure]
    for message in ranks.run("save_after_failure", str(tmp_path), [1, 1, 1], trees, 3, size=3):
        assert [part for part in expected if part not in message] == [], message
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["step-00000009"]


def test_all_ranks_hear_that_their_steps_differ(ranks: RankPool, tmp_path: Path) -> None:
    messages = ranks.run("save_after_failure", str(tmp_path), [1, 2, 1], [THIRDS] * 3, 3, size=3)
    assert messages == ["ValueError: the ranks save different steps: [1, 2, 1]"] * 3


@pytest.mark.parametrize("rank", [0, 2])
def test_all_ranks_hear_that_a_disk_is_full(ranks: RankPool, tmp_path: Path, rank: int) -> None:
    messages = ranks.run(
        "save_after_failure", str(tmp_path), [1] * 3, [THIRDS] * 3, 3, rank, size=3
    )
    expected = (
        f"saving step 1 to {tmp_path} failed: rank {rank}: [Errno 28] No space left on device"
    )
    assert messages == [f"CheckpointWriteError: {expected}"] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_hear_that_a_template_does_not_fit(
    ranks: RankPool, tmp_path: Path, rank: int
) -> None:
    ranks.run("save", str(tmp_path), 1, THIRDS, 3, {}, size=3)
    fits, other = ({"w": tensor("w", shape, ("plain", ALL))} for shape in ((6, 4), (4, 6)))
    templates = [other if number == rank else fits for number in range(2)]
    messages = ranks.errors("load_own", str(tmp_path), templates, 2, size=2)
    problem = "state['w'] has shape (4, 6) in the template, (6, 4) in the checkpoint"
    assert all(problem in message for message in messages)
    assert messages[rank].startswith("CheckpointMismatchError: ")
    assert messages[1 - rank].startswith(f"CheckpointError: rank {rank}: ")
    assert ranks.run("load_own", str(tmp_path), [fits, fits], 2, size=2) == [[], []]
    for message in ranks.errors("load_own", str(tmp_path), [{}, {}], 2, size=2):
        assert (
            "state is an empty dict in the template, and holds sharded tensors under 1 keys"
            in message
        )


@pytest.mark.parametrize("size", [2, 3])
def test_an_optimizer_without_state_is_no_place_for_sharded_tensors(
    ranks: RankPool, tmp_path: Path, size: int
) -> None:
    ranks.run("save_fsdp_optimizer", str(tmp_path), 2, size=2)
    for message in ranks.errors("load_fsdp_optimizer", str(tmp_path), size, False, size=size):
        assert "state['optim']['state'] is an empty dict in the template" in message
        assert "get_optimizer_state_dict of torch.distributed.checkpoint.state_dict" in message
    first, *others = ranks.run("load_fsdp_optimizer", str(tmp_path), size, True, size=size)
    assert len(first) == 2
    for other in others:
        assert all(map(torch.equal, first, other))


def test_an_empty_dict_of_a_rank_that_holds_nothing_of_it(ranks: RankPool, tmp_path: Path) -> None:
    names = {"part": {"w": tensor("part.w", (6, 4), ("dtensor", (2,), ["S0"]))}, "x": 1}
    ranks.run("save", str(tmp_path), 1, names, 2, {}, size=2)
    part = {"w": tensor("part.w", (6, 4), ("plain", ALL))}
    assert ranks.run("load_own", str(tmp_path), [{"part": {}}, {"part": part}], 2, size=2) == [
        [],
        [],
    ]
    assert ranks.run("load_next_to_an_empty_dict", str(tmp_path), 2, size=2) == [{"part": {}}, [24]]
    for other in ({"x": 1}, {"part": {}, "x": 1}):
        for message in ranks.errors("load_own", str(tmp_path), [{"part": {}}, other], 2, size=2):
            assert "state['part'] is an empty dict in the template" in message
    assert (
        ranks.run("load_unfilled", str(tmp_path), 2, size=2)
        == [({"part": {}}, ["part.w", "x"])] * 2
    )
