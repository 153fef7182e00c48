"""Agreement of all ranks before one of them proceeds: that none has failed, the step, and which rank writes what."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar

from gcore_ckpt import errors
from gcore_ckpt.errors import CheckpointError, CheckpointWriteError, LostRankError
from gcore_ckpt.format.boxes import Box
from gcore_ckpt.format.data_file import FileLayout, lay_out
from gcore_ckpt.ranks.group import Group
from gcore_ckpt.saving.plan import Assignment, HeldBox, assign

T = TypeVar("T")

_Message: TypeAlias = Mapping[str, Any]


def exchange(group: Group, message: _Message, decide: Callable[[Sequence[_Message]], Sequence[_Message]]) -> _Message:
    """Return the root's reply to this rank's message; `decide` makes the replies to all of all messages, at the root.

    Raises:
        LostRankError: On all ranks that are left: some are gone.
    """
    try:
        payloads = group.gather(json.dumps(message, separators=(",", ":")).encode())
    except LostRankError as error:
        if group.rank == 0:
            group.scatter([json.dumps({"lost": str(error)}).encode()] * group.size)
        raise
    replies = decide([json.loads(payload) for payload in payloads]) if payloads else []
    reply = json.loads(group.scatter([json.dumps(reply, separators=(",", ":")).encode() for reply in replies]))
    if "lost" in reply:
        raise LostRankError(reply["lost"])
    return reply


def all_succeed(group: Group, act: Callable[[], T]) -> T:
    """Run `act` on every rank; return what it returned here if none failed, else raises on all ranks.

    Raises:
        CheckpointError: On the ranks where `act` raised nothing: what the others raised.
    """
    result, error = attempt(act)

    def collect(messages: Sequence[_Message]) -> Sequence[_Message]:
        failed = [f"rank {rank}: {message['error']}" for rank, message in enumerate(messages) if "error" in message]
        return [{"failed": "; ".join(failed)}] * group.size

    reply = exchange(group, {} if error is None else _as_message(error), collect)
    if error is not None:
        raise error
    if reply["failed"]:
        raise CheckpointError(reply["failed"])
    assert result is not None
    return result[0]


def root_decides(group: Group, decide: Callable[[], T]) -> T:
    """Return what `decide` returns, or raise, at the root; a value that JSON holds."""
    message: _Message = {}
    error: Exception | None = None
    if group.rank == 0:
        result, error = attempt(decide)
        message = {"value": result[0]} if result is not None else _as_message(error)
    message = json.loads(group.scatter([json.dumps(message).encode()] * group.size))
    if error is not None:
        raise error
    if "error" in message:
        _raise_again(message)
    return message["value"]


class SavePlanner:
    """Plans saves: which files each rank writes. The plan is made at the root, and kept while no rank holds else.

    Args:
        group: The ranks that save together.
        max_file_bytes: Largest data file.
    """

    def __init__(self, group: Group, max_file_bytes: int | None) -> None:
        self._group = group
        self._max_file_bytes = max_file_bytes
        self._boxes: tuple[HeldBox, ...] | None = None
        self._files: list[FileLayout] = []
        self._held: dict[int, list[HeldBox]] = {}  # of all ranks, at the root

    def plan(self, step: int, prepare: Callable[[], tuple[HeldBox, ...]]) -> list[FileLayout]:
        """Return the files that this rank writes, once all ranks are ready to save `step`.

        Args:
            step: Number of the step, the same on all ranks.
            prepare: Checks that this rank can save, and gives what it holds.

        Raises:
            ValueError: What the ranks hold does not fit together.
            CheckpointWriteError: Another rank cannot save; or whatever `prepare` raised here.
        """
        boxes, error = attempt(prepare)
        message: dict[str, Any] = {"step": step, "boxes": None} if error is None else _as_message(error)
        if boxes is not None and boxes[0] != self._boxes:
            message["boxes"] = [_plain(box) for box in boxes[0]]
        reply = exchange(self._group, message, self._replies)
        if error is not None:
            raise error
        if "error" in reply:
            _raise_again(reply)
        assert boxes is not None
        if reply["writes"] is not None:
            self._boxes = boxes[0]
            self._files = lay_out({number: self._boxes[number] for number in reply["writes"]}, self._max_file_bytes)
        return self._files

    def _replies(self, messages: Sequence[_Message]) -> list[_Message]:
        """Return the root's answer to each rank: an error, what it writes, or that it writes what it wrote before."""
        failed = {rank: message for rank, message in enumerate(messages) if "error" in message}
        if failed:
            rank, first = next(iter(failed.items()))
            text = first["error"] if len(messages) == 1 else f"rank {rank}: {first['error']}"
            return [{"error": text, "kind": first["kind"]}] * len(messages)
        steps = [message["step"] for message in messages]
        if len(set(steps)) > 1:
            return [_as_message(ValueError(f"the ranks save different steps: {steps}"))] * len(messages)
        changed = {rank: message["boxes"] for rank, message in enumerate(messages) if message["boxes"] is not None}
        if not changed:
            return [{"writes": None}] * len(messages)
        held = self._held | {rank: [_box(fields) for fields in boxes] for rank, boxes in changed.items()}
        try:
            writes: list[Assignment] = assign([held[rank] for rank in range(len(messages))])
        except ValueError as error:
            return [_as_message(error)] * len(messages)
        self._held = held
        return [{"writes": numbers} for numbers in writes]


def attempt(act: Callable[[], T]) -> tuple[tuple[T] | None, Exception | None]:
    """Return what `act` returns, in a tuple, or the error that it raises."""
    try:
        return (act(),), None
    except Exception as error:  # raised by the caller, once the other ranks have heard of it
        return None, error


def _as_message(error: Exception | None) -> dict[str, Any]:
    return {"error": str(error), "kind": type(error).__name__}


def _raise_again(message: _Message) -> NoReturn:
    """Raise what another rank raised, as the same kind of error where it is one of ours."""
    kind = getattr(errors, message["kind"], None)
    if message["kind"] in ("ValueError", "TypeError"):
        kind = {"ValueError": ValueError, "TypeError": TypeError}[message["kind"]]
    raise (kind or CheckpointWriteError)(message["error"])


def _plain(held: HeldBox) -> list[object]:
    return [held.name, held.dtype, held.shape, held.box.start, held.box.shape]


def _box(fields: Sequence[Any]) -> HeldBox:
    name, dtype, shape, start, extent = fields
    return HeldBox(name=name, dtype=dtype, shape=tuple(shape), box=Box(tuple(start), tuple(extent)))
