"""Copies a committed step from one tier to another, each rank a share of its files, without the memory of training.

All that is copied is checked against the checksums of the step's index first.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gcore_ckpt.errors import CheckpointNotFoundError
from gcore_ckpt.format.index import decode_index
from gcore_ckpt.loading.reader import StepReader, read_index
from gcore_ckpt.ranks.group import RankGroup, exchange
from gcore_ckpt.saving.host_memory import allocate
from gcore_ckpt.storage import INDEX_FILE, Storage, step_name
from gcore_ckpt.tiers.node import NodeStorage
from gcore_ckpt.tiers.survey import Report, whole_steps


def copy_step(step: int, source: Storage, target: Storage, group: RankGroup) -> None:
    """Copy a step, which becomes a committed one of the target; raise the same error on all ranks (all ranks)."""

    def share(reports: Sequence[Report]) -> list[tuple[str, list[str]]]:
        """Return the attempt, and the files that each rank copies."""
        files = _readers(step, source, reports)
        names: list[list[str]] = [[] for _ in reports]
        load_bytes = [0] * len(reports)
        for name, (size_bytes, ranks) in sorted(
            files.items(), key=lambda item: (-item[1][0], item[0])
        ):
            rank = min(ranks, key=lambda rank: (load_bytes[rank], rank))
            names[rank].append(name)
            load_bytes[rank] += size_bytes
        attempt = target.begin(step)
        return [(attempt, rank_names) for rank_names in names]

    attempt, names = exchange(
        group, lambda: source.report([step]) if isinstance(source, NodeStorage) else {}, share
    )

    def copy() -> dict[str, Any]:
        copied: dict[str, Any] = {"sizes": {}}
        if not names:
            return copied
        # Not all files of a node, which a load may be reading from other machines at the same time.
        with (source.local if isinstance(source, NodeStorage) else source).open_step(step) as files:
            where = f"{source}/{step_name(step)}"
            index = files.read_index()
            reader = StepReader(where, decode_index(index, f"{where}/{INDEX_FILE}"), files)
            for name in names:
                if name == INDEX_FILE:
                    copied["index"] = index.decode()
                    continue
                data = allocate(files.open(name)).data
                if files.read_into(name, 0, data) != len(data):
                    raise OSError(f"{where}/{name} ends before its {len(data)} bytes")
                reader.check_file(name, data)
                target.write_file(attempt, name, [data])
                copied["sizes"][name] = len(data)
                del data  # before there is memory for the next file
        return copied

    def commit(copies: Sequence[Mapping[str, Any]]) -> list[None]:
        index = next(copied["index"] for copied in copies if "index" in copied)
        sizes: dict[str, int] = {}
        for copied in copies:
            sizes.update(copied["sizes"])
        target.commit(attempt, step, index.encode(), sizes)
        return [None] * len(copies)

    try:
        exchange(group, copy, commit)
    except BaseException:
        if group.rank == 0:
            target.abort(attempt)
        raise


def _readers(
    step: int, source: Storage, reports: Sequence[Report]
) -> dict[str, tuple[int, list[int]]]:
    """Return the files of a step, their sizes, and the ranks that can read each (root)."""
    if isinstance(source, NodeStorage):
        steps = whole_steps(reports)
        if step not in steps:
            raise CheckpointNotFoundError(f"{source} holds no whole step {step}")
        _, copies = steps[step]
        return source.readers(copies)
    ranks = list(range(len(reports)))
    files = {
        name: (file.size_bytes, ranks) for name, file in read_index(source, step).files.items()
    }
    return {INDEX_FILE: (0, ranks)} | files
