"""Plans which files each rank writes.

By the plan of a save every element of every tensor is written once, replicas evenly by the ranks that hold them.
"""

from collections.abc import Callable, Mapping, Sequence

from gcore_ckpt.format.boxes import Box, FileLayout, HeldBox, lay_out, overlap
from gcore_ckpt.ranks.group import Message, RankGroup, exchange
from gcore_ckpt.saving.replicas import check_same


class SavePlanner:
    """Plans which files each rank writes. The root makes the plan, and reuses it until a rank's boxes change."""

    def __init__(self, group: RankGroup, max_file_bytes: int | None) -> None:
        self._group = group
        self._max_file_bytes = max_file_bytes
        self._boxes: tuple[HeldBox, ...] = ()  # of this rank, at the last save
        self._files: list[FileLayout] = []
        self._boxes_by_rank: dict[int, Sequence[HeldBox]] = {}  # of all ranks, at the root

    def plan(
        self,
        step: int,
        prepare: Callable[[], tuple[HeldBox, ...]],
        digests: Callable[[], Mapping[str, str]] = dict[str, str],
    ) -> list[FileLayout]:
        """Return the files that this rank writes, once all ranks are ready to save `step`.

        Where the plan is a new one, as at the first save, the ranks compare what `digests` returns of plain tensors.
        """
        boxes = self._boxes

        def prepare_message() -> Message:
            nonlocal boxes
            boxes = prepare()
            if boxes == self._boxes:
                return {"step": step, "boxes": None}
            return {"step": step, "boxes": boxes}

        numbers = exchange(self._group, prepare_message, self._assign)
        if numbers is not None:
            if self._group.size > 1:
                self._compare(digests)
            self._boxes = boxes
            self._files = lay_out(
                {number: boxes[number] for number in numbers}, self._max_file_bytes
            )
        return self._files

    def _compare(self, digests: Callable[[], Mapping[str, str]]) -> None:
        def check(messages: Sequence[Mapping[str, str]]) -> Sequence[None]:
            check_same(messages)
            return [None] * len(messages)

        try:
            exchange(self._group, digests, check)
        except Exception:
            self._boxes = ()  # so that the next save is planned, and compared, from scratch
            self._boxes_by_rank = {}
            raise

    def _assign(self, messages: Sequence[Message]) -> Sequence[list[int] | None]:
        """Return the numbers of the boxes that each rank writes; None if all write what they wrote before."""
        steps = [message["step"] for message in messages]
        if len(set(steps)) > 1:
            raise ValueError(f"the ranks save different steps: {steps}")
        if all(message["boxes"] is None for message in messages):
            return [None] * len(messages)
        boxes_by_rank = dict(self._boxes_by_rank)
        for rank, message in enumerate(messages):
            boxes = message["boxes"]
            if boxes is None:
                continue
            if rank > 0:  # sent as JSON
                boxes = [HeldBox.from_json(*fields) for fields in boxes]
            boxes_by_rank[rank] = boxes
        writes = assign([boxes_by_rank.get(rank, ()) for rank in range(len(messages))])
        self._boxes_by_rank = boxes_by_rank
        return writes


def assign(boxes_by_rank: Sequence[Sequence[HeldBox]]) -> list[list[int]]:
    """Return the numbers of the boxes that each rank writes: one writer for each box, the bytes spread evenly."""
    holders: dict[
        HeldBox, dict[int, int]
    ] = {}  # the ranks that hold each box, its number in their lists
    for rank, boxes in enumerate(boxes_by_rank):
        for number, box in enumerate(boxes):
            holders.setdefault(box, {}).setdefault(rank, number)
    _check_coverage(holders)
    writes: list[list[int]] = [[] for _ in boxes_by_rank]
    load_bytes = [0] * len(boxes_by_rank)
    shared: list[HeldBox] = []
    for box, numbers in holders.items():
        if len(numbers) > 1:
            shared.append(box)
            continue
        for rank, number in numbers.items():
            writes[rank].append(number)
            load_bytes[rank] += box.size_bytes
    shared.sort(key=lambda box: -box.size_bytes)
    for box in shared:
        rank = min(holders[box], key=lambda rank: (load_bytes[rank], rank))
        writes[rank].append(holders[box][rank])
        load_bytes[rank] += box.size_bytes
    return [sorted(numbers) for numbers in writes]


def _check_coverage(holders: Mapping[HeldBox, Mapping[int, int]]) -> None:
    """Check that the boxes of each tensor, with the ranks that hold each, hold each of its elements once."""
    boxes_of: dict[str, list[HeldBox]] = {}
    for box in holders:
        boxes_of.setdefault(box.name, []).append(box)
    for name, boxes in boxes_of.items():
        first = boxes[0]
        if len(boxes) == 1 and first.is_whole:
            continue
        for box in boxes[1:]:
            if (box.dtype, box.shape) != (first.dtype, first.shape):
                raise ValueError(
                    f"tensor {name!r} has dtype {first.dtype} and shape {first.shape} on rank {min(holders[first])}, "
                    f"dtype {box.dtype} and shape {box.shape} on rank {min(holders[box])}; parts of one tensor are a "
                    "DTensor or a Shard, and what each rank has of its own is wrapped in PerRank"
                )
        shared = overlap([box.box for box in boxes])
        if shared is not None:
            raise ValueError(
                f"tensor {name!r}: the boxes {shared[0]} and {shared[1]} overlap without being the same"
            )
        num_elements = Box.of_shape(first.shape).size
        num_held = sum(box.box.size for box in boxes)
        if num_held != num_elements:
            raise ValueError(
                f"tensor {name!r} of shape {first.shape} is held in part: its boxes have {num_held} of its "
                f"{num_elements} elements"
            )
