"""The ranks that save and load together: messages to and from the root, and a clear error when one of them dies.

Point-to-point messages rather than collectives, so that the death of one rank is seen by the root at once and reported
to all others, instead of leaving them in a call that never completes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, TypeVar

from gcore_ckpt import errors
from gcore_ckpt.errors import CheckpointError, CheckpointWriteError, LostRankError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

T = TypeVar("T")
ProcessGroupArgument: TypeAlias = "ProcessGroup | Literal['world'] | None"
Message: TypeAlias = Mapping[str, Any]


class Group:
    """Ranks 0 (the root) to `size - 1`; this class is the group of this process alone."""

    rank = 0
    size = 1

    def gather(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks, at the root; an empty list elsewhere."""
        return [payload]

    def scatter(self, payloads: Sequence[bytes]) -> bytes:
        """Return this rank's payload; the root gives all of them, the others none."""
        return payloads[0]

    def close(self) -> None:
        """Free what the group holds; it is no longer used."""


class TorchGroup(Group):
    """The ranks of a `torch.distributed` group, over gloo on the host, whatever the backend of that group.

    All its ranks create it together.

    Raises:
        LostRankError: They do not.
    """

    def __init__(self, process_group: "ProcessGroup", timeout_s: float) -> None:
        import torch.distributed as dist
        from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
        from torch.distributed.distributed_c10d import _get_default_store  # pyright: ignore[reportPrivateUsage]

        self._timeout_s = timeout_s
        self._broken: str | None = None
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        # Not dist.new_group: without the ranks outside, its name depends on how many groups a rank is in, which differs
        # from rank to rank (Megatron's embedding groups), and a name that comes again finds the addresses of the dead.
        name = f"gcore-ckpt/{dist.get_process_group_ranks(process_group)}"
        store = _get_default_store()
        count = store.add(f"{name}/{self.rank}", 1)
        try:
            # Its stubs know neither `send` nor `recv`.
            self._group: Any = dist.ProcessGroupGloo(
                PrefixStore(f"{name}/{count}", store), self.rank, self.size, timeout=timedelta(seconds=timeout_s)
            )
        except RuntimeError as error:
            raise LostRankError(
                f"the {self.size} ranks that save or load together did not all connect within {timeout_s:g} s; "
                f"process_group=None saves and loads as this process alone ({error})"
            ) from error

    def gather(self, payload: bytes) -> list[bytes]:
        """Receive from every rank in turn."""
        if self.rank != 0:
            self._send(payload, 0)
            return []
        received = [payload]
        lost: list[str] = []
        for rank in range(1, self.size):
            try:
                received.append(self._receive(rank))
            except LostRankError as error:
                lost.append(str(error))
                if self._broken is not None:  # the others would seem to be lost too
                    break
        if lost:
            raise LostRankError("; ".join(lost))
        return received

    def scatter(self, payloads: Sequence[bytes]) -> bytes:
        """Send to every rank that is still there."""
        if self.rank != 0:
            return self._receive(0)
        for rank, payload in enumerate(payloads[1:], start=1):
            try:
                self._send(payload, rank)
            except LostRankError:  # gather has reported it, or the next one will
                continue
        return payloads[0]

    def close(self) -> None:
        """Close the connections."""
        self._group = None

    def _send(self, payload: bytes, rank: int) -> None:
        import torch

        self._transfer("send", torch.tensor([len(payload)]), rank)
        if payload:
            self._transfer("send", torch.frombuffer(bytearray(payload), dtype=torch.uint8), rank)

    def _receive(self, rank: int) -> bytes:
        import torch

        size = torch.empty(1, dtype=torch.int64)
        self._transfer("recv", size, rank)
        message = torch.empty(int(size), dtype=torch.uint8)
        if len(message):
            self._transfer("recv", message, rank)
        return message.numpy().tobytes()

    def _transfer(self, kind: Literal["send", "recv"], tensor: "torch.Tensor", rank: int) -> None:
        if self._broken is not None:
            raise LostRankError(
                f"this Checkpointer has lost the other ranks ({self._broken}); expected that all ranks close it and "
                "make a new one"
            )
        try:
            getattr(self._group, kind)([tensor], rank, 0).wait()
        except RuntimeError as error:
            is_late = "timed out" in str(error).lower()
            if is_late:
                reason = f"did not answer within {self._timeout_s:g} s"
            elif rank == 0:
                reason = "died, or stopped waiting for another rank that its own error names"
            else:
                reason = "died"
            message = f"rank {rank} of {self.size} {reason}"
            if is_late or rank == 0:  # gloo closes all connections of a process in which one times out
                self._broken = message
            raise LostRankError(message) from error


def open_group(process_group: ProcessGroupArgument, timeout_s: float) -> Group:
    """Return the group to save and load with: that of torch.distributed where there is one."""
    if process_group is None:
        return Group()
    import torch.distributed as dist

    if process_group == "world":
        if not (dist.is_available() and dist.is_initialized()):
            return Group()
        process_group = dist.group.WORLD
    assert process_group is not None
    if dist.get_rank(process_group) < 0:
        raise ValueError("process_group does not contain this process; expected a group of which it is a rank")
    return Group() if dist.get_world_size(process_group) == 1 else TorchGroup(process_group, timeout_s)


def exchange(group: Group, message: Message, decide: Callable[[Sequence[Message]], Sequence[Message]]) -> Message:
    """Return the root's reply to this rank's message; `decide` makes, at the root, all replies of all messages."""
    if group.rank != 0:
        group.gather(_encode(message))
        reply = json.loads(group.scatter([]))
        if "lost" in reply:
            raise LostRankError(reply["lost"])
        return reply
    try:
        payloads = group.gather(b"")
    except LostRankError as error:
        group.scatter([_encode({"lost": str(error)})] * group.size)
        raise
    replies = decide([message, *map(json.loads, payloads[1:])])
    group.scatter([b"", *map(_encode, replies[1:])])
    return replies[0]


def all_succeed(group: Group, act: Callable[[], T]) -> T:
    """Run `act` on every rank; return what it returned here if none failed, else raises on all ranks."""
    result, error = attempt(act)

    def collect(messages: Sequence[Message]) -> Sequence[Message]:
        failed = [f"rank {rank}: {message['error']}" for rank, message in enumerate(messages) if "error" in message]
        return [{"failed": "; ".join(failed)}] * group.size

    reply = exchange(group, {} if error is None else error_message(error), collect)
    if error is not None:
        raise error
    if reply["failed"]:
        raise CheckpointError(reply["failed"])
    assert result is not None
    return result[0]


def root_decides(group: Group, decide: Callable[[], T]) -> T:
    """Return what `decide` returns, or raise, at the root; a value that JSON holds."""
    if group.rank != 0:
        message = json.loads(group.scatter([]))
        if "error" in message:
            raise_again(message)
        return message["value"]
    result, error = attempt(decide)
    group.scatter([_encode(error_message(error) if result is None else {"value": result[0]})] * group.size)
    if error is not None:
        raise error
    assert result is not None
    return result[0]


def attempt(act: Callable[[], T]) -> tuple[tuple[T] | None, Exception | None]:
    """Return what `act` returns, in a tuple, or the error that it raises."""
    try:
        return (act(),), None
    except Exception as error:  # raised by the caller, once the other ranks have heard of it
        return None, error


def error_message(error: Exception | None) -> dict[str, Any]:
    """Return the message that `raise_again` turns into an error."""
    return {"error": str(error) or repr(error), "kind": type(error).__name__}


def raise_again(message: Message) -> NoReturn:
    """Raise what another rank raised, as the same kind of error where it is one of ours."""
    kinds = {"ValueError": ValueError, "TypeError": TypeError}
    kind = kinds.get(message["kind"]) or getattr(errors, message["kind"], None) or CheckpointWriteError
    raise kind(message["error"])


def _encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()
