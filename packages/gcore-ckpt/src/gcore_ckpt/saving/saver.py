"""Writes one step, in the background: every rank its files, then the root the index and the commit."""

import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

from gcore_ckpt.errors import CheckpointWriteError, LostRankError
from gcore_ckpt.format.boxes import BLOCK_BYTES, FileLayout, HeldBox, checksum, digest, lay_out_file
from gcore_ckpt.format.index import encode_index
from gcore_ckpt.format.merging import Replaced, merge
from gcore_ckpt.format.stored import (
    DataFile,
    Index,
    StoredShard,
    StoredTensor,
    checked_tensor,
)
from gcore_ckpt.format.tree import Node, decode, describe, references
from gcore_ckpt.loading.reader import read_index
from gcore_ckpt.ranks.group import Message, RankGroup, exchange, root_decides
from gcore_ckpt.saving.staging import StagedFile
from gcore_ckpt.storage import INDEX_FILE, MAX_INDEX_BYTES, Storage, step_name
from gcore_ckpt.threads import Workers

_LIVE_SHARE = 0.5
"""An incremental save links an older file only while at least this share of its bytes is still in use."""

# The file of a shard, its box, its first byte in the file, and its checksums.
_Shard: TypeAlias = tuple[str, HeldBox, int, str]


@dataclass(kw_only=True)
class _Report:
    """A rank's report to the root about its part of a save; sent as JSON."""

    tree: Node
    # As in index.json.
    files: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    shards: list[_Shard] = field(default_factory=list[_Shard])
    links: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    error: str | None = None
    metric: float | None = None


_Base: TypeAlias = tuple[int, Index]  # the committed step that an incremental save builds on


class Saver:
    """Saves steps, one after another, as one rank of a group of which all do the same; `workers` hash."""

    def __init__(
        self, storage: Storage, group: RankGroup, workers: Workers, *, incremental: bool
    ) -> None:
        self._storage = storage
        self._group = group
        self._workers = workers
        self._incremental = incremental
        self._base: _Base | None = None

    def save(
        self,
        step: int,
        tree: Node,
        staged: Iterable[StagedFile],
        advance: Callable[[int], None] = lambda _: None,
        metric: float | None = None,
    ) -> None:
        """Commit a step from this rank's encoded state and staged files, or raise the same error on every rank.

        ``advance`` is called with the bytes of each file that is written, or found unchanged; ``metric`` is the root's.
        """
        report = _Report(tree=tree, metric=metric)
        try:
            attempt = self._begin(step)
        except Exception as error:
            _release_rest(staged)
            raise self._failure(step, error) from error
        self._write_files(attempt, report, staged, advance)
        self._finish(attempt, step, report)

    def _begin(self, step: int) -> str:
        """Return the name of this attempt, which the root has chosen, and with it the step to build on."""

        def choose() -> tuple[str, int | None]:
            base: int | None = None
            if self._incremental:
                base = max(self._storage.steps(), default=None)
            return self._storage.begin(step), base

        attempt, base = root_decides(self._group, choose)
        if self._base is not None and self._base[0] != base:
            self._base = None
        if self._base is None and base is not None:
            # A damaged or unreadable step is none to build on; this save writes all.
            with suppress(Exception):
                self._base = base, read_index(self._storage, base)
        return attempt

    def _write_files(
        self,
        attempt: str,
        report: _Report,
        staged: Iterable[StagedFile],
        advance: Callable[[int], None],
    ) -> None:
        """Write the files while they are hashed; those of an incremental save after that, as far as they are new."""
        files = iter(staged)
        try:
            for number, file in enumerate(files):
                name = f"data-{self._group.rank:05d}.safetensors"
                if number:
                    name = f"data-{self._group.rank:05d}-{number:05d}.safetensors"
                hashed = self._workers.submit(partial(_digests, file))
                try:
                    file.data[: file.layout.offsets[0]] = file.layout.header
                    if self._base is None:
                        self._storage.write_file(attempt, name, [file.data])
                        self._add_file(report, name, file.layout, hashed.result())
                    else:
                        self._write_changed(
                            attempt, name, report, file, hashed.result(), self._base
                        )
                finally:
                    hashed.wait()  # it reads the memory
                    file.release()
                advance(file.layout.size_bytes)
        except Exception as error:  # reported to all ranks; nothing is swallowed
            report.error = str(error) or repr(error)
            _release_rest(files)

    def _write_changed(
        self,
        attempt: str,
        name: str,
        report: _Report,
        file: StagedFile,
        digests: Sequence[str],
        base: _Base,
    ) -> None:
        changed = _link_unchanged(report, file.layout, digests, base)
        layout = file.layout
        if len(changed) == len(layout.boxes):
            self._storage.write_file(attempt, name, [file.data])
            self._add_file(report, name, layout, digests)
        elif changed:
            new = lay_out_file(
                [layout.numbers[i] for i in changed], [layout.boxes[i] for i in changed]
            )
            pieces = [file.data[layout.offsets[i] : layout.offsets[i + 1]] for i in changed]
            self._storage.write_file(attempt, name, [memoryview(new.header), *pieces])
            self._add_file(report, name, new, [digests[i] for i in changed])

    def _add_file(
        self, report: _Report, name: str, layout: FileLayout, digests: Sequence[str]
    ) -> None:
        for box, offset_bytes, checksums in zip(
            layout.boxes, layout.offsets[:-1], digests, strict=True
        ):
            report.shards.append((name, box, offset_bytes, checksums))
        file = DataFile(
            size_bytes=layout.size_bytes,
            header_size_bytes=len(layout.header),
            header_checksum=checksum(layout.header),
            writer=f"rank {self._group.rank} of {self._group.size} on {socket.gethostname()}",
        )
        report.files[name] = asdict(file)

    def _finish(self, attempt: str, step: int, report: _Report) -> None:
        """Commit what all ranks have written, at the root; every rank learns the outcome."""

        def commit(messages: Sequence[Message]) -> Sequence[None]:
            try:
                self._commit(attempt, step, [_Report(**message) for message in messages])
            except Exception as error:
                self._storage.abort(attempt)
                raise self._failure(step, error) from error
            return [None] * len(messages)

        try:
            exchange(self._group, lambda: vars(report), commit)
        except LostRankError as error:
            if self._group.rank == 0:
                self._storage.abort(attempt)
            raise self._failure(step, error) from error

    def _commit(self, attempt: str, step: int, reports: Sequence[_Report]) -> None:
        errors: list[str] = []
        for rank, report in enumerate(reports):
            if report.error is None:
                continue
            if len(reports) > 1:
                errors.append(f"rank {rank}: {report.error}")
            else:
                errors.append(report.error)
        if errors:
            raise CheckpointWriteError("; ".join(errors))
        index = _merge_index(reports)
        links: dict[str, tuple[int, str]] = {}
        for report in reports:
            links.update(report.links)
        for name, (base_step, file) in links.items():
            self._storage.link_file(attempt, base_step, file, name)
        data = encode_index(index)
        _check_readable(data, index.tree)
        sizes = {name: file.size_bytes for name, file in index.files.items()}
        self._storage.commit(attempt, step, data, sizes)
        if self._incremental:
            self._base = step, index

    def _failure(self, step: int, error: Exception) -> CheckpointWriteError:
        return CheckpointWriteError(
            f"saving step {step} to {self._storage} failed: {str(error) or repr(error)}"
        )


def _digests(file: StagedFile) -> list[str]:
    """Return the checksums of every box of a file, one of each block."""
    return [_digests_of(file.data[start:end]) for start, end in pairwise(file.layout.offsets)]


def _digests_of(data: memoryview) -> str:
    return "".join(
        digest(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES)
    )


def _link_unchanged(
    report: _Report, layout: FileLayout, digests: Sequence[str], base: _Base
) -> list[int]:
    """Report the boxes that the base holds, to be linked; return the numbers of the others."""
    base_step, index = base
    unchanged: dict[str, list[tuple[int, StoredShard]]] = {}
    for i, (box, checksums) in enumerate(zip(layout.boxes, digests, strict=True)):
        tensor = index.tensors.get(box.name)
        if tensor is None or (tensor.dtype, tensor.shape) != (box.dtype, box.shape):
            continue
        for shard in tensor.shards:
            if (shard.box, shard.checksums, shard.block_bytes) == (box.box, checksums, BLOCK_BYTES):
                unchanged.setdefault(shard.file, []).append((i, shard))
    linked: set[int] = set()
    for file, shards in unchanged.items():
        old = index.files[file]
        if sum(shard.size_bytes for _, shard in shards) < _LIVE_SHARE * old.size_bytes:
            continue
        name = file
        if not file.startswith("step-"):
            name = f"{step_name(base_step)}-{file}"
        writer = old.writer.partition(" at step ")[0] + f" at step {int(name.split('-')[1])}"
        report.links[name] = (base_step, file)
        report.files[name] = asdict(old) | {"writer": writer}
        for i, shard in shards:
            linked.add(i)
            report.shards.append((name, layout.boxes[i], shard.offset_bytes, digests[i]))
    return [i for i in range(len(layout.boxes)) if i not in linked]


def _merge_index(reports: Sequence[_Report]) -> Index:
    """Return the index of a step from the parts of all ranks; `ValueError` if they do not fit together."""
    replaced: list[Replaced] = []
    tree = merge([report.tree for report in reports], replaced)
    files: dict[str, DataFile] = {}
    types: dict[str, tuple[str, tuple[int, ...]]] = {}
    shards: dict[str, list[StoredShard]] = {}
    for rank, report in enumerate(reports):
        for name, file in report.files.items():
            files[name] = DataFile(**file)
        for name, box, offset_bytes, checksums in report.shards:
            if rank > 0:  # sent as JSON
                box = HeldBox.from_json(*box)
            types.setdefault(box.name, (box.dtype, box.shape))
            shard = StoredShard(name, offset_bytes, box.size_bytes, box.box, BLOCK_BYTES, checksums)
            shards.setdefault(box.name, []).append(shard)
    missing = [name for name in dict.fromkeys(references(tree)) if name not in shards]
    if missing:
        raise ValueError(f"no rank holds any element of the tensors {missing[:5]}")
    tensors: dict[str, StoredTensor] = {}
    for name, (dtype, shape) in types.items():
        tensors[name] = checked_tensor(name, dtype, shape, shards[name])
    for path, rank, view, base, name in replaced:
        dtype = tensors[base].dtype
        stored = tensors[name]
        if (dtype, view.shape) != (stored.dtype, stored.shape):
            raise ValueError(
                f"{describe(path)} has dtype {dtype} and shape {view.shape} on rank {rank}, dtype {stored.dtype} and "
                f"shape {stored.shape} on others; what each rank has of its own is wrapped in PerRank"
            )
    return Index(
        tree=tree,
        tensors=tensors,
        files=files,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        num_ranks=len(reports),
        metric=reports[0].metric,
    )


def _check_readable(data: bytes, tree: Node) -> None:
    """Raise `ValueError` for what a load would refuse, before it takes the place of a step that can be read."""
    if len(data) > MAX_INDEX_BYTES:
        raise ValueError(
            f"{INDEX_FILE} has {len(data)} bytes; expected at most {MAX_INDEX_BYTES}: it holds all values of the state "
            "that are no tensors or arrays, so that large ones (bytes, long lists of numbers) should be made into these"
        )
    decode(tree, lambda _kind, name, _view: name, lambda nodes: {"dict": dict(nodes)})


def _release_rest(files: Iterable[StagedFile]) -> None:
    """Release the remaining files after an error, which is the one that is reported."""
    with suppress(Exception):
        for file in files:
            file.release()
