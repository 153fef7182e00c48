"""What all ranks must agree on before one of them goes ahead: that none has failed, which step, who writes what."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from gcore_ckpt import errors
from gcore_ckpt.boxes import Box
from gcore_ckpt.data_file import FileLayout, lay_out
from gcore_ckpt.errors import CheckpointError, CheckpointWriteError
from gcore_ckpt.group import Group
from gcore_ckpt.plan import Assignment, HeldBox, assign

T = TypeVar("T")


def all_succeed(group: Group, act: Callable[[], T]) -> T:
    """Runs `act` on every rank; returns what it returned here if none failed, else raises on all ranks.

    Raises:
        CheckpointError: On the ranks where `act` raised nothing: what the others raised.
    """
    result, error = attempt(act)
    message = {"error": None if error is None else str(error)}
    payloads = group.gather(json.dumps(message).encode())
    failed = {rank: message for rank, p in enumerate(payloads) if (message := json.loads(p)["error"]) is not None}
    reply = json.loads(group.scatter([json.dumps(failed).encode()] * group.size))
    if error is not None:
        raise error
    if reply:
        raise CheckpointError("; ".join(f"rank {rank}: {message}" for rank, message in reply.items()))
    assert result is not None
    return result[0]


def root_decides(group: Group, decide: Callable[[], T]) -> T:
    """What `decide` returns, or raises, at the root; a value that JSON holds."""
    message: Mapping[str, Any] = {}
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
        """The files that this rank writes, once all ranks are ready to save `step`.

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
        payloads = self._group.gather(json.dumps(message, separators=(",", ":")).encode())
        replies = self._replies([json.loads(payload) for payload in payloads]) if payloads else []
        reply = json.loads(self._group.scatter([json.dumps(reply).encode() for reply in replies]))
        if error is not None:
            raise error
        if "error" in reply:
            _raise_again(reply)
        assert boxes is not None
        if reply["writes"] is not None:
            self._boxes = boxes[0]
            self._files = lay_out({number: self._boxes[number] for number in reply["writes"]}, self._max_file_bytes)
        return self._files

    def _replies(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The root's answer to each rank: an error, what it writes, or that it writes what it wrote before."""
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
    """What `act` returns, in a tuple, or the error that it raises."""
    try:
        return (act(),), None
    except Exception as error:  # raised by the caller, once the other ranks have heard of it
        return None, error


def _as_message(error: Exception | None) -> dict[str, Any]:
    return {"error": str(error), "kind": type(error).__name__}


def _raise_again(message: Mapping[str, Any]) -> NoReturn:
    """Raises what another rank raised, as the same kind of error where it is one of ours."""
    kind = getattr(errors, message["kind"], None)
    if message["kind"] in ("ValueError", "TypeError"):
        kind = {"ValueError": ValueError, "TypeError": TypeError}[message["kind"]]
    raise (kind or CheckpointWriteError)(message["error"])


def _plain(held: HeldBox) -> list[object]:
    return [held.name, held.dtype, held.shape, held.box.start, held.box.shape]


def _box(fields: Sequence[Any]) -> HeldBox:
    name, dtype, shape, start, extent = fields
    return HeldBox(name=name, dtype=dtype, shape=tuple(shape), box=Box(tuple(start), tuple(extent)))
