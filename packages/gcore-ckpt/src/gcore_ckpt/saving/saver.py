"""Writes one step, in the background: every rank its files, then the root the index and the commit."""

import json
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, cast

from gcore_ckpt.errors import CheckpointWriteError, LostRankError
from gcore_ckpt.format.boxes import Box
from gcore_ckpt.format.checksum import BLOCK_BYTES, DIGITS, block_count, checksum, digest
from gcore_ckpt.format.data_file import FileLayout, PlacedBox, lay_out_file
from gcore_ckpt.format.index import (
    DataFile,
    Index,
    StoredShard,
    StoredTensor,
    check_complete,
    decode_index,
    encode_index,
)
from gcore_ckpt.format.tree import Node, merge, references
from gcore_ckpt.ranks.group import Group
from gcore_ckpt.saving.staging import StagedFile
from gcore_ckpt.storage import Storage, step_name
from gcore_ckpt.workers import Workers

_LIVE_SHARE = 0.5
"""An incremental save links an older file only while at least this share of its bytes is still in use."""

_Key = tuple[str, Box]


@dataclass(kw_only=True)
class _Report:
    """A rank's report to the root about its part of a save; sent as JSON."""

    tree: Node
    shards: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    files: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    links: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Written:
    """A file that is on disk, and the checksums of its boxes, which are there once `hashed` is done."""

    name: str
    file: StagedFile
    digests: list[str]
    hashed: Future[None]


@dataclass(frozen=True, kw_only=True)
class _Base:
    """The committed step that an incremental save builds on."""

    step: int
    index: Index
    shards: Mapping[_Key, tuple[StoredTensor, StoredShard]]


class Saver:
    """Saves steps, one after another, as one rank of a group of which all do the same.

    Args:
        storage: Where to.
        group: Ranks that save together; its messages are not used for anything else meanwhile.
        workers: Threads that hash.
        incremental: Whether shards that are equal in the step before are linked instead of written.
    """

    def __init__(self, storage: Storage, group: Group, workers: Workers, *, incremental: bool) -> None:
        self._storage = storage
        self._group = group
        self._workers = workers
        self._incremental = incremental
        self._base: _Base | None = None

    def save(self, step: int, tree: Node, staged: Iterable[StagedFile]) -> None:
        """Commit a step from the files that every rank has staged, or raise the same error on every rank.

        Args:
            step: Its number.
            tree: This rank's encoded state.
            staged: This rank's files. All are taken and released, whatever happens; an error that the iterator raises
                is this rank's failure.

        Raises:
            CheckpointWriteError: The step is not committed.
        """
        report = _Report(tree=tree)
        try:
            attempt = self._begin(step)
        except Exception as error:
            for file in _quietly(staged):
                file.release()
            raise self._failure(step, error) from error
        self._write_files(attempt, report, staged)
        try:
            self._finish(attempt, step, report)
        except LostRankError as error:
            raise self._failure(step, error) from error

    def _begin(self, step: int) -> str:
        """Return the name of this attempt, which the root has chosen, and with it the step to build on."""
        message: dict[str, Any] = {}
        if self._group.rank == 0:
            try:
                base = self._storage.steps()[-1:] if self._incremental else []
                message = {"attempt": self._storage.begin(step), "base": base[0] if base else None}
            except Exception as error:  # raised below, on all ranks
                message = {"error": str(error) or repr(error)}
        message = json.loads(self._group.scatter([json.dumps(message).encode()] * self._group.size))
        if "error" in message:
            raise CheckpointWriteError(message["error"])
        if message["base"] is None:
            self._base = None
        elif self._base is None or self._base.step != message["base"]:
            self._base = self._open_base(message["base"])
        return cast("str", message["attempt"])

    def _open_base(self, step: int) -> _Base | None:
        try:
            with self._storage.open_step(step) as files:
                index = decode_index(files.read_index(), f"{self._storage}/{step_name(step)}")
        except Exception:  # a damaged or unreadable step is none to build on; this save writes all
            return None
        return _base(step, index)

    def _write_files(self, attempt: str, report: _Report, staged: Iterable[StagedFile]) -> None:
        files = iter(staged)
        written: list[_Written] = []
        try:
            for number, file in enumerate(files):
                name = _file_name(self._group.rank, number)
                if self._base is None:
                    written.append(self._write_while_hashing(attempt, name, file))
                    if file.settled.is_set():
                        self._report_written(report, written)
                else:
                    try:
                        self._write_changed(attempt, name, report, file)
                    finally:
                        file.release()
            self._report_written(report, written)
        except Exception as error:  # reported to all ranks; nothing is swallowed
            report.error = str(error) or repr(error)
            for file in _quietly(files):
                file.release()
            for left in written:
                left.hashed.exception()  # it reads the memory
                left.file.release()

    def _write_while_hashing(self, attempt: str, name: str, file: StagedFile) -> _Written:
        digests: list[str] = []

        def hash_settled() -> None:
            file.settled.wait()
            digests.extend(self._digests(file))

        hashed = self._workers.submit(hash_settled)
        try:
            self._storage.write_file(attempt, name, [file.data])
        except BaseException:
            hashed.exception()
            file.release()
            raise
        return _Written(name=name, file=file, digests=digests, hashed=hashed)

    def _report_written(self, report: _Report, written: list[_Written]) -> None:
        while written:
            done = written[0]
            done.hashed.result()
            self._add_file(report, done.name, done.file.layout, done.digests)
            written.pop(0).file.release()

    def _write_changed(self, attempt: str, name: str, report: _Report, file: StagedFile) -> None:
        digests = self._digests(file)
        changed = self._link_unchanged(report, file.layout, digests)
        if len(changed) == len(file.layout.boxes):
            self._storage.write_file(attempt, name, [file.data])
            self._add_file(report, name, file.layout, digests)
        elif changed:
            kept = [file.layout.boxes[i] for i in changed]
            layout = lay_out_file([(box.number, box.held) for box in kept])
            pieces = [file.data[box.offset_bytes : box.offset_bytes + box.held.size_bytes] for box in kept]
            self._storage.write_file(attempt, name, [memoryview(layout.header), *pieces])
            self._add_file(report, name, layout, [digests[i] for i in changed])

    def _digests(self, file: StagedFile) -> list[str]:
        """Return the checksums of every box of a file."""
        blocks = [_blocks(box) for box in file.layout.boxes]
        return ["".join(digest(file.data[start:end]) for start, end in box) for box in blocks]

    def _add_file(self, report: _Report, name: str, layout: FileLayout, digests: Sequence[str]) -> None:
        for box, checksums in zip(layout.boxes, digests, strict=True):
            report.shards.append(_shard_fields(box, name, box.offset_bytes, checksums))
        writer = f"rank {self._group.rank} of {self._group.size} on {socket.gethostname()}"
        report.files[name] = asdict(
            DataFile(
                size_bytes=layout.size_bytes,
                header_size_bytes=len(layout.header),
                header_checksum=checksum(layout.header),
                writer=writer,
            )
        )

    def _link_unchanged(self, report: _Report, layout: FileLayout, digests: Sequence[str]) -> list[int]:
        """Report the boxes that the base holds, to be linked; return the numbers of the others."""
        base = self._base
        assert base is not None
        unchanged: dict[str, list[tuple[int, StoredShard]]] = {}
        for i, (box, checksums) in enumerate(zip(layout.boxes, digests, strict=True)):
            tensor, shard = base.shards.get((box.held.name, box.held.box), (None, None))
            if tensor is None or shard is None or (tensor.dtype, tensor.shape) != (box.held.dtype, box.held.shape):
                continue
            if shard.checksums == checksums and shard.block_bytes == BLOCK_BYTES:
                unchanged.setdefault(shard.file, []).append((i, shard))
        linked: set[int] = set()
        for file, shards in unchanged.items():
            live_bytes = sum(layout.boxes[i].held.size_bytes for i, _ in shards)
            if live_bytes < _LIVE_SHARE * base.index.files[file].size_bytes:
                continue
            name = file if file.startswith("step-") else f"{step_name(base.step)}-{file}"
            report.links[name] = (base.step, file)
            report.files[name] = asdict(base.index.files[file]) | {
                "writer": base.index.files[file].writer.partition(" at step ")[0]
                + f" at step {int(name.split('-')[1])}"
            }
            for i, shard in shards:
                linked.add(i)
                report.shards.append(_shard_fields(layout.boxes[i], name, shard.offset_bytes, digests[i]))
        return [i for i in range(len(layout.boxes)) if i not in linked]

    def _finish(self, attempt: str, step: int, report: _Report) -> None:
        """Commit what all ranks have written, at the root; every rank learns the outcome."""
        if self._group.rank != 0:
            self._group.gather(json.dumps(asdict(report), separators=(",", ":")).encode())
            error = json.loads(self._group.scatter([]))["error"]
            if error is not None:
                raise CheckpointWriteError(error)
            return
        error: Exception | None = None
        try:
            others = self._group.gather(b"")[1:]
            self._commit(attempt, step, [report, *(_Report(**json.loads(payload)) for payload in others)])
        except Exception as caught:
            self._storage.abort(attempt)
            error = caught
        failure = None if error is None else self._failure(step, error)
        message = json.dumps({"error": None if failure is None else str(failure)}).encode()
        self._group.scatter([message] * self._group.size)
        if failure is not None:
            raise failure from error

    def _commit(self, attempt: str, step: int, reports: Sequence[_Report]) -> None:
        errors = [
            f"rank {rank}: {report.error}" if len(reports) > 1 else report.error
            for rank, report in enumerate(reports)
            if report.error is not None
        ]
        if errors:
            raise CheckpointWriteError("; ".join(errors))
        index = _merged_index(reports)
        links = {name: link for report in reports for name, link in report.links.items()}
        for name, (base_step, file) in links.items():
            self._storage.link_file(attempt, base_step, file, name)
        sizes = {name: file.size_bytes for name, file in index.files.items()}
        self._storage.commit(attempt, step, encode_index(index), sizes)
        if self._incremental:
            self._base = _base(step, index)

    def _failure(self, step: int, error: Exception) -> CheckpointWriteError:
        prefix = f"saving step {step} to {self._storage} failed: "
        message = str(error) or repr(error)
        return CheckpointWriteError(message if message.startswith(prefix) else prefix + message)


def _file_name(rank: int, number: int) -> str:
    return f"data-{rank:05d}.safetensors" if number == 0 else f"data-{rank:05d}-{number:05d}.safetensors"


def _blocks(box: PlacedBox) -> Iterator[tuple[int, int]]:
    end = box.offset_bytes + box.held.size_bytes
    for number in range(block_count(box.held.size_bytes, BLOCK_BYTES)):
        start = box.offset_bytes + number * BLOCK_BYTES
        yield start, min(start + BLOCK_BYTES, end)


def _shard_fields(box: PlacedBox, file: str, offset_bytes: int, checksums: str) -> dict[str, Any]:
    assert len(checksums) % DIGITS == 0
    held = box.held
    return {
        "name": held.name,
        "dtype": held.dtype,
        "shape": held.shape,
        "start": held.box.start,
        "extent": held.box.shape,
        "file": file,
        "offset_bytes": offset_bytes,
        "checksums": checksums,
    }


def _merged_index(reports: Sequence[_Report]) -> Index:
    """Return the index of a step from the parts of all ranks.

    Raises:
        ValueError: They do not fit together.
    """
    tree = merge([report.tree for report in reports])
    shards: dict[str, list[StoredShard]] = {name: [] for name in references(tree)}
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for fields in (fields for report in reports for fields in report.shards):
        kinds[fields["name"]] = fields["dtype"], tuple(fields["shape"])
        shard = StoredShard(
            file=fields["file"],
            offset_bytes=fields["offset_bytes"],
            box=Box(tuple(fields["start"]), tuple(fields["extent"])),
            block_bytes=BLOCK_BYTES,
            checksums=fields["checksums"],
        )
        shards.setdefault(fields["name"], []).append(shard)
    missing = [name for name in shards if name not in kinds]
    if missing:
        raise ValueError(f"no rank holds any element of the tensors {missing[:5]}")
    tensors: dict[str, StoredTensor] = {}
    for name, parts in shards.items():
        dtype, shape = kinds[name]
        tensors[name] = StoredTensor(dtype=dtype, shape=shape, shards=tuple(parts))
        try:
            check_complete(tensors[name])
        except ValueError as error:
            raise ValueError(f"tensor {name!r}: {error}") from error
    return Index(
        tree=tree,
        tensors=tensors,
        files={name: DataFile(**file) for report in reports for name, file in report.files.items()},
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        num_ranks=len(reports),
    )


def _base(step: int, index: Index) -> _Base:
    shards = {(name, s.box): (tensor, s) for name, tensor in index.tensors.items() for s in tensor.shards}
    return _Base(step=step, index=index, shards=shards)


def _quietly(files: Iterable[StagedFile]) -> Iterator[StagedFile]:
    """Return what is left of an iterator of which an error has been seen already."""
    try:
        yield from files
    except Exception:  # its first error is the one that is reported
        return
