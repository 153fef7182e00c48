"""The plan of a save: every element of every tensor is written once, replicas evenly by the ranks that hold them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gcore_ckpt.format.boxes import Box, HeldBox, overlap
from gcore_ckpt.format.data_file import FileLayout, lay_out
from gcore_ckpt.ranks.group import Group, Message, attempt, error_message, exchange, raise_again


class SavePlanner:
    """Plans saves: which files each rank writes. The plan is made at the root, and kept while no rank holds else."""

    def __init__(self, group: Group, max_file_bytes: int | None) -> None:
        self._group = group
        self._max_file_bytes = max_file_bytes
        self._boxes: tuple[HeldBox, ...] | None = None
        self._files: list[FileLayout] = []
        self._held: dict[int, Sequence[HeldBox]] = {}  # of all ranks, at the root

    def plan(self, step: int, prepare: Callable[[], tuple[HeldBox, ...]]) -> list[FileLayout]:
        """Return the files that this rank writes, once all ranks are ready to save `step`."""
        boxes, error = attempt(prepare)
        message: dict[str, Any] = {"step": step, "boxes": None} if error is None else error_message(error)
        if boxes is not None and boxes[0] != self._boxes:
            message["boxes"] = [[box.name, box.dtype, box.shape, box.box.start, box.box.shape] for box in boxes[0]]
        reply = exchange(self._group, message, self._replies)
        if error is not None:
            raise error
        if "error" in reply:
            raise_again(reply)
        assert boxes is not None
        if reply["writes"] is not None:
            self._boxes = boxes[0]
            self._files = lay_out({number: self._boxes[number] for number in reply["writes"]}, self._max_file_bytes)
        return self._files

    def _replies(self, messages: Sequence[Message]) -> list[Message]:
        """Return the root's answer to each rank: an error, what it writes, or that it writes what it wrote before."""
        failed = {rank: message for rank, message in enumerate(messages) if "error" in message}
        if failed:
            rank, first = next(iter(failed.items()))
            text = first["error"] if len(messages) == 1 else f"rank {rank}: {first['error']}"
            return [{"error": text, "kind": first["kind"]}] * len(messages)
        steps = [message["step"] for message in messages]
        if len(set(steps)) > 1:
            return [error_message(ValueError(f"the ranks save different steps: {steps}"))] * len(messages)
        changed = {rank: message["boxes"] for rank, message in enumerate(messages) if message["boxes"] is not None}
        if not changed:
            return [{"writes": None}] * len(messages)
        held = self._held | {rank: [_box(*fields) for fields in boxes] for rank, boxes in changed.items()}
        try:
            writes = assign([held[rank] for rank in range(len(messages))])
        except ValueError as error:
            return [error_message(error)] * len(messages)
        self._held = held
        return [{"writes": numbers} for numbers in writes]


def _box(name: str, dtype: str, shape: Sequence[int], start: Sequence[int], extent: Sequence[int]) -> HeldBox:
    return HeldBox(name=name, dtype=dtype, shape=tuple(shape), box=Box(tuple(start), tuple(extent)))


def assign(held: Sequence[Sequence[HeldBox]]) -> list[list[int]]:
    """Return the boxes that each rank writes: one writer for each, the same bytes for all as far as that goes."""
    holders: dict[HeldBox, dict[int, int]] = {}  # the ranks that hold each distinct box, and its number in their lists
    for rank, boxes in enumerate(held):
        for number, box in enumerate(boxes):
            holders.setdefault(box, {}).setdefault(rank, number)
    _check_coverage(holders)
    writes: list[list[int]] = [[] for _ in held]
    load_bytes = [0] * len(held)
    for box, numbers in sorted(holders.items(), key=lambda item: (len(item[1]) > 1, -item[0].size_bytes)):
        rank = min(numbers, key=lambda rank: (load_bytes[rank], rank))
        writes[rank].append(numbers[rank])
        load_bytes[rank] += box.size_bytes
    return [sorted(numbers) for numbers in writes]


def _check_coverage(holders: Mapping[HeldBox, Mapping[int, int]]) -> None:
    tensors: dict[str, list[HeldBox]] = {}
    for box in holders:
        tensors.setdefault(box.name, []).append(box)
    for name, boxes in tensors.items():
        first = boxes[0]
        for box in boxes[1:]:
            if (box.dtype, box.shape) != (first.dtype, first.shape):
                ranks = min(holders[first]), min(holders[box])
                raise ValueError(
                    f"tensor {name!r} has dtype {first.dtype} and shape {first.shape} on rank {ranks[0]}, "
                    f"dtype {box.dtype} and shape {box.shape} on rank {ranks[1]}; parts of one tensor are a DTensor or "
                    "a Shard, and what each rank has of its own is wrapped in PerRank"
                )
        shared = overlap([box.box for box in boxes])
        if shared is not None:
            raise ValueError(f"tensor {name!r}: the boxes {shared[0]} and {shared[1]} overlap without being the same")
        whole, found = Box.whole(first.shape).size, sum(box.box.size for box in boxes)
        if found != whole:
            raise ValueError(
                f"tensor {name!r} of shape {first.shape} is held in part: its boxes have {found} of its "
                f"{whole} elements"
            )
