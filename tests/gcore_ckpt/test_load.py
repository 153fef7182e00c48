"""What a load can ask for in one process: templates, parts, other dtypes, views of the file, older formats."""

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gcore_ckpt
from gcore_ckpt import Checkpointer, CheckpointMismatchError, PerRank, Shard, Shards, verify
from gcore_ckpt.storage.local import LocalFiles

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(3, 40)).sum().backward()
    optim.step()
    state = {
        "model": model.state_dict(),
        "optim": optim.state_dict(),
        "step": 7,
        "array": np.arange(5),
    }
    gcore_ckpt.save(tmp_path / "ckpt", state, step=3)
    return tmp_path / "ckpt"


def test_a_template_is_filled_in_place(saved: Path) -> None:
    whole = gcore_ckpt.load(saved)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20))
    array = np.zeros(5, np.int64)
    template = {"model": model.state_dict(), "step": None, "array": array}
    loaded = gcore_ckpt.load(saved, template)
    assert loaded["array"] is array
    assert (array == np.arange(5)).all()
    assert loaded["step"] == 7
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, whole["model"][name])
        assert loaded["model"][name].data_ptr() == parameter.data_ptr()


def test_an_optimizer_continues_as_if_uninterrupted(saved: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20))
    optim = torch.optim.AdamW(model.parameters(), lr=0.5)
    optim.load_state_dict(gcore_ckpt.load(saved)["optim"])
    assert optim.param_groups[0]["lr"] == 0.1
    assert sorted(optim.state_dict()["state"]) == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
def test_another_dtype_and_strides(saved: Path, dtype: torch.dtype) -> None:
    expected = gcore_ckpt.load(saved)["model"]["0.weight"]
    target = torch.zeros(40, 30, dtype=dtype).T
    gcore_ckpt.load(saved, {"model": {"0.weight": target}})
    assert torch.equal(target, expected.to(dtype))


def test_a_box_of_a_tensor(saved: Path) -> None:
    expected = gcore_ckpt.load(saved)["model"]["0.weight"]
    for rows, columns in (
        (slice(0, 30), slice(0, 40)),
        (slice(3, 9), slice(0, 40)),
        (slice(29, 30), slice(5, 33)),
    ):
        tensor = torch.zeros(expected[rows, columns].shape)
        shard = Shard(global_shape=(30, 40), offset=(rows.start, columns.start), tensor=tensor)
        loaded = gcore_ckpt.load(saved, {"model": {"0.weight": shard}})
        assert loaded["model"]["0.weight"] is shard
        assert torch.equal(tensor, expected[rows, columns])


def test_parts_by_their_paths(saved: Path) -> None:
    whole = gcore_ckpt.load(saved)
    assert set(gcore_ckpt.load(saved, only=["model", "step"])) == {"model", "step"}
    part = gcore_ckpt.load(saved, only=["optim.state", "model.0.bias"])
    assert list(part["model"]) == ["0.bias"]
    assert list(part["optim"]["state"]) == [0, 1, 2, 3]
    assert torch.equal(part["optim"]["state"][2]["exp_avg"], whole["optim"]["state"][2]["exp_avg"])
    with pytest.raises(
        CheckpointMismatchError,
        match="holds nothing under 'modle'; it holds model, optim, step, array",
    ):
        gcore_ckpt.load(saved, only=["modle", "step"])


def test_parts_by_patterns(saved: Path) -> None:
    whole = gcore_ckpt.load(saved)
    part = gcore_ckpt.load(saved, only=["*.bias", "optim.*.[02].exp_avg*", "model"])
    assert list(part) == ["model", "optim"]
    assert part["model"].keys() == whole["model"].keys()
    assert {i: set(own) for i, own in part["optim"]["state"].items()} == {
        i: {"exp_avg", "exp_avg_sq"} for i in (0, 2)
    }
    assert list(gcore_ckpt.load(saved, only=["model.?.bias"])["model"]) == ["0.bias", "1.bias"]
    with pytest.raises(CheckpointMismatchError, match=r"holds nothing under '\*\.bia'"):
        gcore_ckpt.load(saved, only=["model", "*.bia"])


def test_a_part_that_is_none_is_there(tmp_path: Path) -> None:
    gcore_ckpt.save(tmp_path, {"a": None, "b": {"c": None, "d": 1}, "e": 2})
    assert gcore_ckpt.load(tmp_path, only=["a", "b.c"]) == {"a": None, "b": {"c": None}}


def test_meta_tensors_are_created_again(saved: Path) -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20))
    state = gcore_ckpt.load(saved, {"model": model.state_dict()})["model"]
    model.load_state_dict(state, assign=True)
    assert torch.equal(model(torch.ones(40)), model(torch.ones(40)))
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_memory_mapped_tensors_are_private_views_of_the_file(saved: Path) -> None:
    whole, mapped = gcore_ckpt.load(saved), gcore_ckpt.load(saved, mmap=True)
    weight = mapped["model"]["0.weight"]
    assert torch.equal(weight, whole["model"]["0.weight"])
    weight.zero_()
    verify(saved)
    assert torch.equal(gcore_ckpt.load(saved)["model"]["0.weight"], whole["model"]["0.weight"])


def test_tied_weights_that_were_saved_once_are_not_missed(tmp_path: Path) -> None:
    weight = torch.randn(4, 3)
    gcore_ckpt.save(tmp_path, {"embed": weight})
    tied = torch.zeros(4, 3)
    gcore_ckpt.load(tmp_path, {"embed": tied, "lm_head": tied})
    assert torch.equal(tied, weight)
    with pytest.raises(CheckpointMismatchError, match=r"does not hold state\['lm_head'\]$"):
        gcore_ckpt.load(tmp_path, {"embed": tied, "lm_head": torch.zeros(4, 3)})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            {"model": {"0.weight": torch.zeros(30, 41)}},
            r"\['0.weight'\] has shape \(30, 41\) in the template, \(30, 40\)",
        ),
        ({"model": {"9.weight": torch.zeros(1)}}, r"does not hold state\['model'\]\['9.weight'\]"),
        (
            {"model": {"0.weight": torch.zeros(30, 40).int()}},
            "has dtype torch.int32 in the template, to which torch",
        ),
        (
            {"step": torch.zeros(1)},
            r"state\['step'\] is a tensor in the template, no tensor in the checkpoint",
        ),
        (
            {"step": {"x": torch.zeros(1)}},
            r"state\['step'\] is a dict in the template, int in the checkpoint",
        ),
        (
            {"model": [torch.zeros(1)]},
            r"state\['model'\] is a sequence of 1 items in the template, dict in the",
        ),
        (
            {"step": PerRank(None)},
            r"state\['step'\] is PerRank in the template and was not saved as such",
        ),
        (
            {"model": {"0.bias": Shard(global_shape=(30,), offset=(9,), tensor=torch.zeros(30))}},
            r"is a Shard of shape \(30,\) at \(9,\), which is not inside the global shape \(30,\)",
        ),
    ],
)
def test_a_template_that_does_not_fit_is_refused_before_anything_is_filled(
    saved: Path, template: Any, message: str
) -> None:
    untouched = torch.full((20,), -1.0)
    first = {"model": {"1.bias": untouched}} if isinstance(template.get("model"), dict) else {}
    whole = {**template, "model": {**first["model"], **template["model"]}} if first else template
    with pytest.raises(CheckpointMismatchError, match=message):
        gcore_ckpt.load(saved, whole)
    assert (untouched == -1).all()


def test_values_of_each_rank_need_as_many_ranks(tmp_path: Path) -> None:
    gcore_ckpt.save(tmp_path, {"rng": PerRank({"seed": torch.arange(3)}), "x": 1})
    assert torch.equal(gcore_ckpt.load(tmp_path)["rng"]["seed"], torch.arange(3))
    target = torch.zeros(3, dtype=torch.int64)
    gcore_ckpt.load(tmp_path, {"rng": PerRank({"seed": target})})
    assert torch.equal(target, torch.arange(3))


@pytest.mark.parametrize("size", [1, 1_000_003, 3_000_000])
def test_blocks_at_the_edges_of_a_box(tmp_path: Path, size: int) -> None:
    """Boxes that begin and end inside, before and behind the blocks that have a checksum each."""
    data = torch.arange(size)
    gcore_ckpt.save(tmp_path, {"x": data})
    block = (4 << 20) // data.itemsize
    edges = sorted(
        {0, 1, block - 1, block, block + 1, 2 * block, size - 1, size} & set(range(size + 1))
    )
    for first in edges:
        for last in (edge for edge in edges if edge > first):
            target = torch.zeros(last - first, dtype=torch.int64)
            gcore_ckpt.load(
                tmp_path, {"x": Shard(global_shape=(size,), offset=(first,), tensor=target)}
            )
            assert torch.equal(target, data[first:last])


@pytest.mark.parametrize("shape", [(3000, 2000), (3, 2_000_003), (2, 3, 500_000), (5, 300_000, 3)])
def test_columns_are_read_in_whole_blocks_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    data = torch.randint(0, 1000, shape, dtype=torch.int32)
    gcore_ckpt.save(tmp_path, {"x": data})
    reads: list[int] = []
    read_into = LocalFiles.read_into

    def read(self: LocalFiles, name: str, offset_bytes: int, buffer: memoryview) -> int:
        reads.append(len(buffer))
        return read_into(self, name, offset_bytes, buffer)

    monkeypatch.setattr(LocalFiles, "read_into", read)
    for dim in range(1, len(shape)):
        for parts in (2, 64):
            for part in data.chunk(parts, dim)[::31]:
                offset = [0] * len(shape)
                offset[dim] = int(
                    (part.data_ptr() - data.data_ptr()) // data.itemsize // data.stride(dim)
                )
                target = torch.zeros_like(part, memory_format=torch.contiguous_format)
                reads.clear()
                gcore_ckpt.load(
                    tmp_path, {"x": Shard(global_shape=shape, offset=tuple(offset), tensor=target)}
                )
                assert torch.equal(target, part)
                assert max(reads) <= 4 << 20, (
                    "memory of one block for each thread, however many ranks share a tensor"
                )
                assert sum(reads) <= data.nbytes + 1000, "the header and each block at most once"


def test_chunked_staging_saves_the_same_with_less_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gcore_ckpt.saving.staging.CHUNK_BYTES", 10_000)
    state = {
        "a": torch.randn(100, 77),
        "b": torch.randn(20_002)[::2],
        "c": torch.arange(3),
        "d": torch.randn(50, 60).T,
    }
    with Checkpointer(tmp_path, staging="chunked") as checkpointer:
        for step in range(2):
            checkpointer.save(step, state).wait()
        sizes = [path.stat().st_size for path in (tmp_path / "step-00000001").glob("*.safetensors")]
        assert len(sizes) > 5
        assert max(sizes) < 12_000
        loaded = checkpointer.load()
    verify(tmp_path)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_incremental_saves_link_what_has_not_changed(tmp_path: Path) -> None:
    base, lora = torch.randn(200, 100), torch.randn(10)
    state = {"base": base, "lora": lora}
    with Checkpointer(tmp_path, incremental=True, keep=2) as checkpointer:
        for step in range(4):
            lora.fill_(step)
            checkpointer.save(step, state | {"step": step}).wait()
        for step in (2, 3):
            loaded = checkpointer.load(step=step)
            verify(tmp_path, step)
            assert torch.equal(loaded["base"], base)
            assert (loaded["lora"] == step).all()
    folder = tmp_path / "step-00000003"
    assert {path.name for path in folder.glob("*.safetensors")} == {
        "step-00000000-data-00000.safetensors",
        "data-00000.safetensors",
    }
    assert (folder / "step-00000000-data-00000.safetensors").stat().st_nlink == 2
    assert (folder / "data-00000.safetensors").stat().st_size < 1000
    with Checkpointer(
        tmp_path, incremental=True
    ) as checkpointer:  # a new process builds on what it finds
        base.add_(1)
        checkpointer.save(9, state).wait()
        assert {path.name for path in (tmp_path / "step-00000009").glob("*.safetensors")} == {
            "data-00000.safetensors"
        }
        assert torch.equal(checkpointer.load()["base"], base)


def test_an_incremental_save_builds_on_no_damaged_step(tmp_path: Path) -> None:
    state = {"base": torch.randn(200, 100)}
    with Checkpointer(tmp_path, incremental=True) as checkpointer:
        checkpointer.save(1, state).wait()
    index = tmp_path / "step-00000001" / "index.json"
    index.write_bytes(index.read_bytes()[:-9])
    with Checkpointer(tmp_path, incremental=True) as checkpointer:
        checkpointer.save(2, state).wait()
    verify(tmp_path)


def test_a_step_of_more_files_than_a_process_may_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gcore_ckpt.format.boxes._FILE_BYTES", 1)
    monkeypatch.setattr("gcore_ckpt.format.boxes._MAX_FILES", 10_000)
    state = {f"x{i}": torch.tensor([i]) for i in range(450)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
    assert len(list((tmp_path / "step-00000001").glob("*.safetensors"))) == 450
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, limits[1]))
    try:
        found = checkpointer.load()
        template = {name: torch.empty_like(tensor) for name, tensor in state.items()}
        checkpointer.load(template)
        verify(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == state
    assert template == state


def test_format_version_1() -> None:
    verify(GOLDEN / "version-1")
    state = gcore_ckpt.load(GOLDEN / "version-1")
    assert torch.equal(state["w"], torch.arange(6.0).view(2, 3))
    assert state["tied"] is state["w"]
    assert torch.equal(state["b"], torch.tensor([1, -2, 3], dtype=torch.bfloat16))
    assert state["a"].dtype == np.uint16
    assert (state["a"] == np.arange(4)).all()
    assert state["empty"].shape == (0, 2)
    assert torch.equal(state["z"], torch.tensor([1 + 2j]))
    assert state["list"] == [1, 2**80, (None, True, float("inf"))]
    assert state["lr"] == 0.1
    row = torch.zeros(1, 2)
    gcore_ckpt.load(
        GOLDEN / "version-1", {"w": Shard(global_shape=(2, 3), offset=(1, 1), tensor=row)}
    )
    assert torch.equal(row, torch.tensor([[4.0, 5.0]]))


def boxes_of(tensor: torch.Tensor, cuts: list[tuple[slice, slice]]) -> Shards:
    return Shards(
        [
            Shard(global_shape=tuple(tensor.shape), offset=(r.start, c.start), tensor=tensor[r, c])
            for r, c in cuts
        ]
    )


def test_several_boxes_at_one_place(tmp_path: Path) -> None:
    """What one process holds in boxes, another has whole, and the other way round; none is an answer too."""
    cuts = [(slice(0, 3), slice(0, 5)), (slice(3, 7), slice(0, 2)), (slice(3, 7), slice(2, 5))]
    whole = torch.randn(7, 5)
    gcore_ckpt.save(tmp_path / "boxes", {"model": {"w": boxes_of(whole, cuts)}})
    assert torch.equal(gcore_ckpt.load(tmp_path / "boxes")["model"]["w"], whole)
    gcore_ckpt.save(tmp_path / "whole", {"model": {"w": whole}})
    for path in ("boxes", "whole"):
        filled = torch.zeros(7, 5)
        template = {"model": {"w": boxes_of(filled, cuts[1:])}}
        assert gcore_ckpt.load(tmp_path / path, template)["model"]["w"] is template["model"]["w"]
        assert torch.equal(filled[3:], whole[3:])
        assert not filled[:3].any()
        assert (
            gcore_ckpt.load(tmp_path / path, {"model": {"w": Shards([])}})["model"]["w"].parts == []
        )


def test_a_box_outside_its_tensor_is_refused(tmp_path: Path) -> None:
    outside = Shards([Shard(global_shape=(4,), offset=(3,), tensor=torch.zeros(2))])
    with pytest.raises(ValueError, match=r"^state\['w'\] is a Shard of shape \(2,\) at \(3,\)"):
        gcore_ckpt.save(tmp_path, {"w": outside})


def test_policies_of_own_values_are_checked() -> None:
    with pytest.raises(
        ValueError,
        match="otherwise is 'last'; expected None, 'first' or a function of rank and size",
    ):
        PerRank(1, otherwise="last")  # pyright: ignore[reportArgumentType]
