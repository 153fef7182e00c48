"""What a template makes of a step: its own types, parts of it, and a report of what was missing and unused."""

import enum
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from rank_pool import RankPool
from safetensors.torch import load_file
from torch.testing._internal.two_tensor import TwoTensor

import gcore_ckpt
from gcore_ckpt import Checkpointer, CheckpointMismatchError, CorruptCheckpointError
from gcore_ckpt.loading.reader import open_step
from gcore_ckpt.storage.local import open_storage
from gcore_ckpt.tools.compare import compare


class Phase(enum.Enum):
    WARM_UP = "warm-up"
    DECAY = "decay"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Moments(NamedTuple):
    mean: torch.Tensor
    steps: int


@dataclass(frozen=True)
class Progress:
    step: int
    seen: set[int]
    weights: torch.Tensor
    phase: Phase = Phase.WARM_UP
    ready: bool = field(default=False, init=False)


def make_state() -> dict[str, Any]:
    progress = Progress(7, {3, 1}, torch.arange(4.0), Phase.DECAY)
    object.__setattr__(progress, "ready", True)
    return {
        "progress": progress,
        "moments": [Moments(torch.ones(3), 5)],
        "level": Level.HIGH,
        "rng": b"\x00\xffstate",
        "loss": np.float32(0.1),
    }


def test_types_of_the_template_come_back(tmp_path: Path) -> None:
    gcore_ckpt.save(tmp_path, make_state())
    template: dict[str, Any] = {
        "progress": Progress(0, set(), weights := torch.zeros(4)),
        "moments": [Moments(torch.zeros(3), 0)],
        "level": Level.LOW,
        "rng": b"",
        "loss": None,
    }
    found = gcore_ckpt.load(tmp_path, template)
    progress = found["progress"]
    assert isinstance(progress, Progress)
    assert (progress.step, progress.seen, progress.phase, progress.ready) == (
        7,
        {1, 3},
        Phase.DECAY,
        True,
    )
    assert progress.weights is weights
    assert torch.equal(weights, torch.arange(4.0))
    assert isinstance(found["moments"][0], Moments)
    assert torch.equal(found["moments"][0].mean, torch.ones(3))
    assert found["moments"][0].steps == 5
    assert found["level"] is Level.HIGH
    assert found["rng"] == b"\x00\xffstate"
    assert type(found["loss"]) is np.float32
    assert template["progress"].step == 0, "the template itself keeps its small values"


def test_without_a_template_they_are_plain(tmp_path: Path) -> None:
    gcore_ckpt.save(tmp_path, make_state())
    found = gcore_ckpt.load(tmp_path)
    plain = {"step": 7, "seen": {1, 3}, "phase": "decay", "ready": True}
    assert {key: value for key, value in found["progress"].items() if key != "weights"} == plain
    assert type(found["moments"][0]) is tuple
    assert found["level"] == 2


def test_an_enum_that_lacks_the_value_is_named(tmp_path: Path) -> None:
    gcore_ckpt.save(tmp_path, {"a": {"level": 9}})
    with pytest.raises(
        CheckpointMismatchError,
        match=r"state\['a'\]\['level'\] holds no Level in .*: 9 is not a valid",
    ):
        gcore_ckpt.load(tmp_path, {"a": {"level": Level.LOW}})


def test_tensors_made_of_others(tmp_path: Path) -> None:
    """As quantized ones are: both parts are stored, and filled in place, or made on another device."""
    gcore_ckpt.save(
        tmp_path, {"w": torch.nn.Parameter(TwoTensor(torch.arange(3.0), torch.ones(3)))}
    )
    saved = gcore_ckpt.load(tmp_path)["w"]
    assert torch.equal(saved["a"], torch.arange(3.0))
    assert saved["__class__"] == "torch.testing._internal.two_tensor.TwoTensor"
    template = TwoTensor(torch.zeros(3), torch.zeros(3))
    assert gcore_ckpt.load(tmp_path, {"w": template})["w"] is template
    assert torch.equal(template.a, torch.arange(3.0))
    assert torch.equal(template.b, torch.ones(3))
    on_meta = TwoTensor(torch.zeros(3, device="meta"), torch.zeros(3, device="meta"))
    made = gcore_ckpt.load(tmp_path, {"w": on_meta})["w"]
    assert isinstance(made, TwoTensor)
    assert torch.equal(made.b, torch.ones(3))

    gcore_ckpt.save(
        tmp_path, {"w": {"a": torch.ones(3), "b": torch.ones(3), "__class__": "another"}}, step=1
    )
    with pytest.raises(
        CheckpointMismatchError,
        match=r"state\['w'\] is a torch.*TwoTensor in the template, something",
    ):
        gcore_ckpt.load(tmp_path, {"w": template})


def test_a_report_of_what_was_missing_and_unused(tmp_path: Path) -> None:
    saved = {
        "model": {"a": torch.ones(2), "head": torch.ones(5)},
        "optim": {"state": {0: torch.ones(2)}},
        "step": 3,
    }
    gcore_ckpt.save(tmp_path, saved, step=4)
    a, new = torch.zeros(2), torch.full((3,), 7.0)
    template = {"model": {"a": a, "new_head": new, "tied": a}, "extra": {"x": {"y": 1}}}
    checkpointer = Checkpointer(tmp_path)
    with pytest.raises(
        CheckpointMismatchError,
        match=r"does not hold state\['model'\]\['new_head'\], state\['extra'\]",
    ):
        checkpointer.load(template)
    assert torch.equal(a, torch.zeros(2)), "nothing is filled by a load that is refused"

    handle = checkpointer.load_async(template, strict=False)
    found = handle.wait()
    assert found["model"]["new_head"] is new
    assert found["extra"] == {"x": {"y": 1}}
    assert torch.equal(new, torch.full((3,), 7.0))
    assert torch.equal(a, torch.ones(2))
    report = handle.report
    assert report.step == 4
    assert report.missing == ["model.new_head", "extra.x.y"]
    assert report.unused == ["model.head", "optim", "step"]
    assert report.size_bytes == 8
    # A shape that differs is no missing entry.
    with pytest.raises(
        CheckpointMismatchError, match=r"\['a'\] has shape \(3,\) in the template, \(2,\)"
    ):
        checkpointer.load({"model": {"a": torch.zeros(3)}}, strict=False)
    with pytest.raises(ValueError, match="strict is False and there is no template"):
        checkpointer.load(strict=False)


def test_a_load_goes_on_while_the_caller_works(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.randn(3 << 20), "small": [torch.ones(2), 1]}
    gcore_ckpt.save(tmp_path, state)
    may_read, advances = threading.Event(), list[tuple[int, int]]()

    def progress(count: int, total: int) -> None:
        may_read.wait()
        advances.append((count, total))

    with Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.load_async(progress=progress)
        with pytest.raises(TimeoutError, match=r"the step is still being loaded after 0\.05 s"):
            handle.wait(timeout_s=0.05)
        assert not handle.done()
        may_read.set()
        second = checkpointer.load_async(only=["small"])  # after the first
        assert second.wait()["small"][1] == 1
        assert handle.done()
        assert torch.equal(handle.wait()["w"], state["w"])
        third = checkpointer.load_async()
    assert third.done(), "closing waits for it"
    loaded = weakref.ref(third.wait()["w"])
    del third
    assert loaded() is None, "the Checkpointer does not keep what was loaded"
    size_bytes = (3 << 20) * 4 + 8
    assert {total for _, total in advances} == {size_bytes}
    assert sum(count for count, _ in advances) == size_bytes == handle.report.size_bytes
    assert min(handle.report.open_s, handle.report.match_s, handle.report.read_s) > 0


def test_a_load_in_the_background_raises_when_it_is_waited_for(tmp_path: Path) -> None:
    gcore_ckpt.save(tmp_path, {"w": torch.ones(1000)})
    [file] = tmp_path.glob("step-*/data-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    handle = Checkpointer(tmp_path).load_async({"w": torch.zeros(1000)})
    with pytest.raises(CorruptCheckpointError, match="tensor 'w' has checksum"):
        handle.wait()


def test_what_a_save_did(tmp_path: Path) -> None:
    advances: list[tuple[int, int]] = []
    with Checkpointer(tmp_path) as checkpointer:
        start_s = time.perf_counter()
        handle = checkpointer.save(
            1, {"w": torch.ones(1 << 20)}, progress=lambda *counts: advances.append(counts)
        )
        stall_s = time.perf_counter() - start_s
        handle.wait()
    report = handle.report
    [file] = tmp_path.glob("step-*/data-*.safetensors")
    assert report.size_bytes == report.written_bytes == file.stat().st_size
    assert advances == [(report.size_bytes, report.size_bytes)]
    assert 0 < report.plan_s + report.copy_s <= report.stall_s <= stall_s
    assert report.write_s > 0


@st.composite
def memories(draw: st.DrawFn) -> list[torch.Tensor]:
    """Tensors of which many lie in the memory of others."""
    base = torch.randn(
        draw(st.integers(1, 4)), draw(st.integers(1, 4)), dtype=draw(st.sampled_from(DTYPES))
    )
    rows, columns = base.shape
    others = {
        "the same": base.view(base.shape),
        "turned": base.t(),
        "flat": base.view(-1),
        "repeated": base[:1].expand(3, columns),
        "rows": base[draw(st.integers(0, rows)) :],
        "column": base[:, draw(st.integers(0, columns - 1))],
        "bits": base.view(torch.int32) if base.dtype == torch.float32 else base.view(torch.int16),
        "another": torch.randn(2),
    }
    names = draw(st.lists(st.sampled_from(sorted(others)), max_size=6))
    return draw(
        st.permutations([*draw(st.sampled_from(([base], []))), *(others[name] for name in names)])
    )


DTYPES = [torch.float32, torch.bfloat16]


@given(memories())
def test_memory_is_stored_once(tensors: list[torch.Tensor]) -> None:
    """In any order, values come back; tensors that lie in the memory of another one do so again."""
    with tempfile.TemporaryDirectory() as path:
        gcore_ckpt.save(path, tensors)
        gcore_ckpt.verify(path)
        found = gcore_ckpt.load(path)
        templates = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        gcore_ckpt.load(path, templates)
        size_bytes = sum(
            tensor.nbytes for tensor in gcore_ckpt.load(path, mmap=True) if tensor._base is None
        )
    for tensor, new, template in zip(tensors, found, templates, strict=True):
        assert (new.dtype, new.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(new, tensor)
        assert torch.equal(template, tensor)
    whole = [t for t in tensors if t.is_contiguous() and t.numel()]
    for i, base in enumerate(whole):
        for tensor in whole[:i]:
            is_inside = base.data_ptr() <= tensor.data_ptr() < base.data_ptr() + base.nbytes
            if is_inside and tensor.dtype == base.dtype and tensor.nbytes < base.nbytes:
                new, new_base = (
                    found[next(k for k, t in enumerate(tensors) if t is x)] for x in (tensor, base)
                )
                assert new.data_ptr() - new_base.data_ptr() == tensor.data_ptr() - base.data_ptr()
    assert size_bytes <= sum(t.nbytes for t in tensors)


def test_views_in_a_template_and_on_the_command_line(tmp_path: Path) -> None:
    """A view alone is filled from the memory that it lay in, is exported as it was, and is compared."""
    w = torch.arange(12.0).view(3, 4)
    gcore_ckpt.save(tmp_path / "a", {"m": {"w": w, "turned": w.t(), "tail": w[1:]}})
    [file] = (tmp_path / "a").glob("step-*/data-*.safetensors")
    assert sorted(load_file(file)) == ["m.w"]
    tail = torch.zeros(2, 4, dtype=torch.float64)
    gcore_ckpt.load(tmp_path / "a", {"m": {"tail": tail}})
    assert torch.equal(tail, w[1:].double())
    assert torch.equal(gcore_ckpt.load(tmp_path / "a", only=["m.turned"])["m"]["turned"], w.t())
    with pytest.raises(
        CheckpointMismatchError, match=r"\['tail'\] has shape \(3, 4\) in the template, \(2, 4\)"
    ):
        gcore_ckpt.load(tmp_path / "a", {"m": {"tail": torch.zeros(3, 4)}})

    gcore_ckpt.export_hf(tmp_path / "a", tmp_path / "hf", prefix="m", dtype="bfloat16")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(exported["turned"], w.t().bfloat16())
    assert torch.equal(exported["tail"], w[1:].bfloat16())

    apart = {"m": {"w": w, "turned": w.t().clone(), "tail": w[1:] + 1}}
    gcore_ckpt.save(tmp_path / "b", apart)
    a, b = (open_storage(tmp_path / name) for name in "ab")
    with open_step(a, 0) as first, open_step(b, 0) as second:
        assert [found[:2] for found in compare(first, second)] == [("bytes", "m.tail")]


@pytest.mark.parametrize(
    ("kinds", "is_tied"),
    [(["view", "view"], True), (["view", "own"], False), (["own", "view"], False)],
)
def test_ranks_need_not_tie_alike(
    ranks: RankPool, tmp_path: Path, kinds: list[str], is_tied: bool
) -> None:
    found = ranks.run("save_tied", str(tmp_path), kinds, size=2)
    assert found == [[is_tied, [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]]] * 2


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (
            ["view", "wide"],
            r"state['turned'] has dtype float32 and shape (3, 2) on rank 0, dtype float64 and shape (3",
        ),
        (
            ["flat", "own"],
            r"state['turned'] has dtype float32 and shape (6,) on rank 0, dtype float32 and shape (3, 2",
        ),
        (["view", "flat"], "state['turned'] is {'view': ['w', [3, 2]"),
        (["view", "number"], "state['turned'] is {'view': ['w', [3, 2]"),
        (["number", "view"], "state['turned'] is 3 on rank 0 and {'view': ['w'"),
    ],
)
def test_ranks_that_tie_other_tensors_are_refused(
    ranks: RankPool, tmp_path: Path, kinds: list[str], message: str
) -> None:
    errors = ranks.errors("save_tied", str(tmp_path), kinds, size=2)
    assert all(message in error for error in errors), errors
    assert Checkpointer(tmp_path).steps() == []


def test_an_empty_dict_loads_what_was_saved_there(tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(3, 2, bias=False)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optim = make()
    model(torch.ones(3)).sum().backward()
    optim.step()
    gcore_ckpt.save(
        tmp_path, {"model": model.state_dict(), "optim": optim.state_dict(), "empty": {}, "x": 1}
    )
    other_model, other_optim = make()
    template = {"model": other_model.state_dict(), "optim": other_optim.state_dict(), "empty": {}}
    saved = gcore_ckpt.load(tmp_path, template)
    assert saved["empty"] == {}
    other_optim.load_state_dict(saved["optim"])
    for one, one_optim in ((model, optim), (other_model, other_optim)):
        one_optim.zero_grad()
        one(torch.ones(3)).sum().backward()
        one_optim.step()
    assert torch.equal(
        other_optim.state_dict()["state"][0]["exp_avg"], optim.state_dict()["state"][0]["exp_avg"]
    )
    with pytest.raises(
        CheckpointMismatchError,
        match=r"state\['x'\] is a dict in the template, int in the checkpoint",
    ):
        gcore_ckpt.load(tmp_path, {"x": {}})
