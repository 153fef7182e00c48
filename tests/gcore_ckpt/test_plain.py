"""States of many small tensors: copied and read together, to the bit."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gcore_ckpt import Checkpointer, Shards, load, verify
from gcore_ckpt.format.boxes import DTYPES, HeldBox, lay_out
from gcore_ckpt.ranks.shards import TORCH_DTYPES, collect


def test_a_place_without_shards_is_no_dict() -> None:
    """Alone among plain tensors, too: it is a tensor that other ranks hold."""
    state = {"w": torch.ones(2), "x": Shards([])}
    assert collect(state).tree == {"dict": {"w": {"tensor": "w"}, "x": {"tensor": "x"}}}


def random_bits(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    data = torch.randint(
        0, 2 if dtype == "bool" else 256, (math.prod(shape) * DTYPES[dtype].size_bytes,)
    )
    return data.to(torch.uint8).view(TORCH_DTYPES[dtype]).view(shape)


def zeros(dtype: torch.dtype | np.dtype[Any], shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of zeros, without a warning of torch's for complex32."""
    kind = dtype if isinstance(dtype, torch.dtype) else TORCH_DTYPES[dtype.name]
    return torch.zeros(math.prod(shape) * kind.itemsize, dtype=torch.uint8).view(kind).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg()
    integers = {
        1: torch.uint8,
        2: torch.int16,
        4: torch.int32,
        8: torch.int64,
        16: torch.complex128,
    }
    return plain.view(integers[plain.itemsize]).numpy().tobytes()


def make_small() -> dict[str, Any]:
    """Return small tensors of every type and of many forms, several next to each other."""
    state: dict[str, Any] = {
        f"{dtype}.{i}": random_bits(dtype, shape)
        for dtype in DTYPES
        for i, shape in enumerate([(3,), (2, 3), (), (0, 2), (5,)])
    }
    for name in ("float32", "complex64"):
        state[f"{name}.turned"] = random_bits(name, (4, 3)).t()
        state[f"{name}.repeated"] = random_bits(name, (3,)).expand(2, 3)
    state["complex64.conj"] = random_bits("complex64", (4,)).conj()
    state["float32.neg"] = random_bits("complex64", (4,)).conj().imag
    state["parameter"] = torch.nn.Parameter(torch.randn(3))
    state["array"] = np.arange(3, dtype=np.float32)
    state["long"] = torch.randn(20_000)
    return state


@pytest.mark.parametrize("staging", ["full", "chunked"])
def test_small_tensors_of_every_kind(tmp_path: Path, staging: Any) -> None:
    state = make_small()
    expected = {
        name: value.tobytes() if isinstance(value, np.ndarray) else bits(value)
        for name, value in state.items()
    }
    with Checkpointer(tmp_path, staging=staging) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state)
    verify(tmp_path)
    with torch.inference_mode():  # tensors that only inference may change
        template = {
            name: zeros(value.dtype, value.shape)
            for name, value in load(tmp_path, mmap=True).items()
        }
    turned = {name: zeros(value.dtype, value.shape[::-1]).t() for name, value in template.items()}
    for found in (load(tmp_path), load(tmp_path, template), load(tmp_path, turned)):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert (value.tobytes() if isinstance(value, np.ndarray) else bits(value)) == expected[
                name
            ], name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_small_tensors_on_a_cuda_device(tmp_path: Path) -> None:
    expected = {
        name: value for name, value in make_small().items() if isinstance(value, torch.Tensor)
    }
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            state = {
                name: value.cuda()
                for name, value in expected.items()
                if value.dtype != torch.complex32
            }
            checkpointer.save(step, state)
            for name in ("float32.0", "float32.1", "int64.0", "bool.0"):
                state[name].zero_()
        checkpointer.wait()
    verify(tmp_path)
    for step in (1, 2):
        for name, value in load(tmp_path, step=step).items():
            assert bits(value) == bits(expected[name]), name


def test_what_changes_after_a_save_is_not_in_it(tmp_path: Path) -> None:
    state = [torch.full((8,), float(i)) for i in range(2000)]
    with Checkpointer(tmp_path, max_in_flight=3) as checkpointer:
        for step in range(3):
            checkpointer.save(step, state)
            for tensor in state:
                tensor += 1
        checkpointer.wait()
        for step in range(3):
            found = torch.stack(checkpointer.load(step=step))
            assert torch.equal(found, torch.arange(2000.0).add(step)[:, None].expand(2000, 8))


def test_files_are_laid_out_again_when_tensors_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []

    def count(boxes: dict[int, HeldBox], max_file_bytes: int | None) -> Any:
        planned.append(len(boxes))
        return lay_out(boxes, max_file_bytes)

    monkeypatch.setattr("gcore_ckpt.saving.planner.lay_out", count)
    with Checkpointer(tmp_path) as checkpointer:
        for step, size in enumerate([3, 3, 3, 4, 4]):
            checkpointer.save(
                step, {"a": torch.zeros(size), "step": step, "b": [torch.ones(2)]}
            ).wait()
            assert load(tmp_path)["a"].shape == (size,)
            assert len(planned) == (1 if step < 3 else 2)
