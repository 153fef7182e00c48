"""`torch.distributed.checkpoint` saves and loads steps of ours, on one process and on several, in other numbers."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rank_pool import RankPool
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import (
    _load_state_dict_from_keys as load_whole,  # pyright: ignore[reportPrivateUsage]
    load as load_with_dcp,
)
from torch.distributed.checkpoint.state_dict_saver import (
    async_save as async_save_with_dcp,
    save as save_with_dcp,
)

import gcore_ckpt
from gcore_ckpt import Checkpointer, verify
from gcore_ckpt.integrations.dcp import StorageReader, StorageWriter
from gcore_ckpt.loading.reader import open_step, step_leaves
from gcore_ckpt.storage.local import open_storage

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is (disabled|unavailable):UserWarning"
)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_one_process_saves_and_loads(tmp_path: Path) -> None:
    model, optimizer = trained()
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "rows": [torch.ones(2, dtype=torch.bfloat16), 5, {"none": None, "empty": []}],
        "numbers": [1, 2.5],
        "pair": (1, torch.ones(2)),
        "scalar": torch.tensor(7),
        "nothing": torch.zeros(0, 3),
        "view": torch.arange(12).view(3, 4).t(),
    }
    save_with_dcp(state, storage_writer=StorageWriter(tmp_path, step=3))
    verify(tmp_path)

    other = torch.nn.Linear(3, 2)
    other_optimizer = torch.optim.AdamW(other.parameters())
    other(torch.zeros(1, 3)).sum().backward()
    other_optimizer.step()
    loaded: dict[str, Any] = {
        "model": other,
        "optimizer": other_optimizer,
        "rows": [torch.zeros(2), 0, {"none": 1, "empty": [1]}],
        "numbers": [],
        "pair": (),
        "scalar": torch.tensor(0),
        "nothing": torch.zeros(0, 3),
        "view": torch.zeros(4, 3, dtype=torch.int64),
    }
    rows, view = loaded["rows"][0], loaded["view"]
    load_with_dcp(loaded, storage_reader=StorageReader(tmp_path))
    assert loaded["rows"][0] is rows, "filled in place"
    assert torch.equal(rows, torch.ones(2))
    assert loaded["rows"][1:] == [5, {"none": None, "empty": []}]
    assert loaded["numbers"] == [1, 2.5]
    assert loaded["pair"][0] == 1
    assert torch.equal(loaded["pair"][1], torch.ones(2))
    assert loaded["scalar"] == 7
    assert torch.equal(view, state["view"])
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(
        optimizer.state_dict()["state"][0]["exp_avg"],
        other_optimizer.state_dict()["state"][0]["exp_avg"],
    )


def test_the_step_is_nested_as_the_state_was(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {
        "model": model,
        "optimizer": optimizer,
        "rows": [torch.ones(2), {"rate": 0.5}],
        "pair": (1, "a"),
    }
    save_with_dcp(state, storage_writer=StorageWriter(tmp_path, step=3))
    loaded = gcore_ckpt.load(tmp_path)
    assert list(loaded) == list(state)
    assert torch.equal(loaded["model"]["weight"], model.state_dict()["weight"])
    assert loaded["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    assert torch.equal(
        loaded["optimizer"]["state"]["1"]["exp_avg"], optimizer.state_dict()["state"][1]["exp_avg"]
    )
    assert (loaded["rows"][1], loaded["pair"]) == ({"rate": 0.5}, (1, "a"))
    with open_step(open_storage(tmp_path), 3) as reader:
        assert {"model.weight", "optimizer.state.0.exp_avg", "rows.0"} <= {
            leaf.path for leaf in step_leaves(reader)
        }


def test_what_a_checkpointer_has_saved_is_loaded(tmp_path: Path) -> None:
    model, optimizer = trained()
    shared = torch.arange(6.0).view(2, 3)
    state = {
        "model": model,
        "optimizer": optimizer,
        "tied": shared,
        "twice": shared,
        "epoch": 3,
        "by_number": {7: "x"},
    }
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, state)
    whole = load_whole(storage_reader=StorageReader(tmp_path, step=5))
    assert torch.equal(whole["tied"], shared)
    assert torch.equal(whole["twice"], shared)
    assert (whole["epoch"], whole["by_number"]) == (3, {"7": "x"})
    assert torch.equal(
        whole["optimizer"]["state"]["0"]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )
    assert whole["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]


def test_a_checkpointer_keeps_its_options_and_stays_open(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        writer = StorageWriter(checkpointer)
        for step in (1, 2, 3):
            save_with_dcp(
                {"w": torch.full((2,), float(step))}, checkpoint_id=str(step), storage_writer=writer
            )
        checkpointer.wait()
        assert checkpointer.steps() == [2, 3]
    loaded = {"w": torch.zeros(2)}
    load_with_dcp(loaded, checkpoint_id="2", storage_reader=StorageReader(tmp_path))
    assert loaded["w"].tolist() == [2.0, 2.0]


def test_an_async_save_keeps_what_was_there(tmp_path: Path) -> None:
    weights = torch.ones(1000)
    saving = async_save_with_dcp(
        {"w": weights, "n": 1}, storage_writer=StorageWriter(tmp_path, step=1)
    )
    weights.zero_()
    cast("Any", saving).result()
    assert torch.equal(gcore_ckpt.load(tmp_path)["w"], torch.ones(1000))


@pytest.mark.slow
def test_a_process_of_dcp_saves(tmp_path: Path) -> None:
    program = f"""
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from gcore_ckpt.integrations.dcp import StorageWriter

if __name__ == "__main__":
    dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
    dcp.async_save(
        {{"w": torch.ones(3)}},
        storage_writer=StorageWriter("{tmp_path}/steps", step=1),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    ).result()
    dist.destroy_process_group()
"""
    (tmp_path / "program.py").write_text(program)
    subprocess.run([sys.executable, tmp_path / "program.py"], check=True, timeout=300)
    assert gcore_ckpt.load(tmp_path / "steps")["w"].tolist() == [1, 1, 1]


def test_a_save_that_nothing_waits_for_is_committed_at_the_end_of_the_program(
    tmp_path: Path,
) -> None:
    program = f"""
import torch
import torch.distributed.checkpoint as dcp
from gcore_ckpt.integrations.dcp import StorageWriter
dcp.async_save({{"w": torch.ones(3)}}, storage_writer=StorageWriter("{tmp_path}", step=1))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=300)
    assert gcore_ckpt.load(tmp_path)["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": object()}}, r"state\['a'\]\['b'\] is a builtins.object"),
        ({"a": {"b": 1j}}, r"state\['a'\]\['b'\] is a builtins.complex"),
        ({"a": torch.ones(2).to_sparse()}, r"state\['a'\] has layout torch.sparse_coo"),
    ],
)
def test_what_no_state_may_hold_is_refused_with_its_path(
    tmp_path: Path, state: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointException) as raised:
        save_with_dcp(state, storage_writer=StorageWriter(tmp_path, step=1))
    [(error, _)] = raised.value.failures.values()
    assert isinstance(error, TypeError)
    with pytest.raises(TypeError, match=message):
        raise error
    assert Checkpointer(tmp_path).steps() == []


def failure(act: Callable[[], object]) -> str:
    with pytest.raises(CheckpointException) as raised:
        act()
    [(error, _)] = raised.value.failures.values()
    return str(error)


def test_a_step_has_a_number(tmp_path: Path) -> None:
    state = {"w": torch.ones(1)}
    assert "step is None; expected a number" in failure(
        lambda: save_with_dcp(state, storage_writer=StorageWriter(tmp_path))
    )
    with pytest.raises(ValueError, match="checkpoint_id is 'last'; expected the number of a step"):
        save_with_dcp(state, checkpoint_id="last", storage_writer=StorageWriter(tmp_path))
    save_with_dcp(state, storage_writer=StorageWriter(tmp_path, step=1))
    again = failure(lambda: save_with_dcp(state, storage_writer=StorageWriter(tmp_path, step=1)))
    assert "already holds step 1" in again
    missing = failure(lambda: load_with_dcp(state, storage_reader=StorageReader(tmp_path, step=2)))
    assert "holds no step 2" in missing


def test_what_was_not_saved_is_not_loaded(tmp_path: Path) -> None:
    save_with_dcp({"w": torch.ones(2)}, storage_writer=StorageWriter(tmp_path, step=1))
    reader = StorageReader(tmp_path)
    assert "Missing key" in failure(
        lambda: load_with_dcp({"v": torch.ones(2)}, storage_reader=reader)
    )
    assert "Size mismatch" in failure(
        lambda: load_with_dcp({"w": torch.ones(3)}, storage_reader=reader)
    )


@pytest.mark.parametrize("is_async", [False, True])
def test_ranks_save_and_other_numbers_of_ranks_load(
    ranks: RankPool, tmp_path: Path, is_async: bool
) -> None:
    expected = ranks.run("train_and_save_by_dcp", str(tmp_path), 2, is_async, size=2)[0]
    verify(tmp_path)
    state = gcore_ckpt.load(tmp_path)
    assert state["app"]["model"]["0.weight"].shape == (7, 10)
    writers = Counter(path.name for path in (tmp_path / "step-00000007").glob("data-*"))
    assert writers == {"data-00000.safetensors": 1, "data-00001.safetensors": 1}, (
        "every rank has written a part"
    )
    for load, size in (
        ("load_by_dcp_and_train", 3),
        ("load_by_dcp_and_train", 1),
        ("load_as_stateful_and_train", 3),
    ):
        for found in ranks.run(load, str(tmp_path), size, size=size):
            for name, weights in expected.items():
                assert torch.allclose(found[name], weights, rtol=0, atol=1e-6), (load, size, name)


def test_ranks_save_stateful_objects_and_dcp_loads_them(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run("save_as_stateful", str(tmp_path), 2, size=2)[0]
    for found in ranks.run("load_by_dcp_and_train", str(tmp_path), 3, size=3):
        for name, weights in expected.items():
            assert torch.allclose(found[name], weights, rtol=0, atol=1e-6)


def test_values_that_differ_between_ranks_are_refused_or_kept(
    ranks: RankPool, tmp_path: Path
) -> None:
    for error in ranks.errors("save_own_values", str(tmp_path), 2, False, size=2, timeout_s=300):
        assert (
            "state['place'] is of 0 on rank 0 and of 1 on rank 1; wrap what each rank has of its own"
            in error
        )
    assert Checkpointer(tmp_path).steps() == []
    ranks.run("save_own_values", str(tmp_path), 2, True, size=2, timeout_s=300)
    assert ranks.run("load_own_values", str(tmp_path), 2, size=2, timeout_s=300) == ["of 0", "of 1"]


def test_ranks_that_find_different_steps_load_none(ranks: RankPool, tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": torch.ones(2)})
    for error in ranks.errors("load_different_steps", str(tmp_path), 2, size=2, timeout_s=300):
        assert "the latest steps of" in error
        assert "are [1, 2] on the ranks" in error
