"""A checkpoint backend of another kind: steps in a dictionary. A `Storage` is all that a `Checkpointer` needs."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

from gcore_ckpt import Checkpointer, CheckpointNotFoundError, CheckpointWriteError, checkpointer
from gcore_ckpt.storage import Storage


@dataclass
class MemoryStorage:
    """A `gcore_ckpt.storage.Storage`."""

    name: str
    max_file_bytes: int | None = None
    files: dict[int | str, dict[str, bytes]] = field(
        default_factory=dict[int | str, dict[str, bytes]]
    )
    """The files of each committed step, and of each attempt."""
    aside: list[int] = field(default_factory=list[int])

    def __str__(self) -> str:
        return self.name

    def steps(self) -> list[int]:
        return sorted(step for step in self.files if isinstance(step, int))

    @contextmanager
    def open_step(self, step: int) -> Generator["MemoryFiles"]:
        if step not in self.files:
            raise FileNotFoundError(step)
        yield MemoryFiles(self.files[step])

    def acquire(self) -> None: ...

    def release(self) -> None: ...

    def begin(self, step: int) -> str:
        attempt = f"{step}, attempted"
        self.files[attempt] = {}
        return attempt

    def write_file(self, attempt: str, name: str, parts: Sequence[memoryview]) -> None:
        self.files[attempt][name] = b"".join(parts)

    def link_file(self, attempt: str, step: int, file: str, name: str) -> None:
        self.files[attempt][name] = self.files[step][file]

    def commit(self, attempt: str, step: int, index: bytes, sizes: Mapping[str, int]) -> None:
        written = self.files.pop(attempt)
        if step in self.files or {name: len(data) for name, data in written.items()} != dict(sizes):
            raise OSError(f"{self.name}: step {step} is not what it should be")
        self.files[step] = {**written, "index.json": index}

    def abort(self, attempt: str) -> None:
        self.files.pop(attempt, None)

    def remove(self, step: int) -> None:
        del self.files[step]

    def set_aside(self, steps: Sequence[int]) -> None:
        for step in steps:
            del self.files[step]
        self.aside += steps

    def steps_set_aside(self) -> list[int]:
        return sorted(self.aside)

    def remove_set_aside(self) -> None:
        self.aside.clear()


@dataclass(frozen=True)
class MemoryFiles:
    """The `gcore_ckpt.storage.StepFiles` of a step."""

    files: Mapping[str, bytes]

    def read_index(self) -> bytes:
        return self.files["index.json"]

    def open(self, name: str) -> int:
        if name not in self.files:
            raise FileNotFoundError(name)
        return len(self.files[name])

    def read_into(self, name: str, offset_bytes: int, buffer: memoryview) -> int:
        data = self.files[name][offset_bytes : offset_bytes + len(buffer)]
        buffer[: len(data)] = data
        return len(data)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Storage:
    """What `open_storage` returns for any path."""
    storage: Storage = MemoryStorage("own://ckpt")
    monkeypatch.setattr(checkpointer, "open_storage", lambda _: storage)
    return storage


@pytest.mark.parametrize("incremental", [False, True])
def test_saves_loads_retention_and_rollback(storage: Storage, *, incremental: bool) -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    with Checkpointer("own://ckpt", keep=2, incremental=incremental) as saved:
        for step in (1, 2, 3):
            saved.save(step, {"weight": weight + step, "same": weight, "step": step})
        saved.wait()
        assert saved.steps() == storage.steps() == [2, 3]
        filled = torch.zeros(3, 4)
        assert saved.load({"weight": filled, "step": None})["step"] == 3
        assert torch.equal(filled, weight + 3)
        assert saved.rollback(2) == [3]
        assert torch.equal(saved.load(only=["weight"])["weight"], weight + 2)
    with pytest.raises(CheckpointNotFoundError):
        Checkpointer("own://ckpt").load(step=3)


def test_a_failed_write_leaves_no_step(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(storage, "write_file", full)
    with Checkpointer("own://ckpt") as saved:
        with pytest.raises(CheckpointWriteError, match="no space left"):
            saved.save(1, {"weight": torch.ones(2)}).wait()
        assert saved.steps() == []
