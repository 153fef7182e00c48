"""The ranks that save and load together: messages to and from the root, and a clear error when one of them dies.

Point-to-point messages rather than collectives, so that the death of one rank is seen by the root at once and reported
to all others, instead of leaving them in a call that never completes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from gcore_ckpt import errors
from gcore_ckpt.errors import CheckpointWriteError, LostRankError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
ProcessGroupArgument: TypeAlias = "ProcessGroup | Literal['world'] | None"
Message: TypeAlias = Mapping[str, Any]

_FOREVER = timedelta(days=365)


class RankGroup:
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


class TorchGroup(RankGroup):
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
                PrefixStore(f"{name}/{count}", store),
                self.rank,
                self.size,
                timeout=timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            raise LostRankError(
                f"the {self.size} ranks that save or load together did not all connect within {timeout_s:g} s; "
                f"process_group=None saves and loads as this process alone ({error})"
            ) from error

    def gather(self, payload: bytes) -> list[bytes]:
        if self.rank != 0:
            self.send(payload, 0)
            return []
        received = [payload]
        lost: list[str] = []
        for rank in range(1, self.size):
            try:
                received.append(self.receive(rank))
            except LostRankError as error:
                lost.append(str(error))
                if self._broken is not None:  # the others would seem to be lost too
                    break
        if lost:
            raise LostRankError("; ".join(lost))
        return received

    def scatter(self, payloads: Sequence[bytes]) -> bytes:
        if self.rank != 0:
            return self.receive(0)
        for rank, payload in enumerate(payloads[1:], start=1):
            with suppress(LostRankError):  # gather has reported it, or the next one will
                self.send(payload, rank)
        return payloads[0]

    def close(self) -> None:
        self._group = None

    def send(self, payload: bytes, rank: int) -> None:
        """Send bytes to one rank, which calls `receive`."""
        self.send_from(memoryview(bytearray(len(payload).to_bytes(8, "little"))), rank)
        self.send_from(memoryview(bytearray(payload)), rank)

    def receive(self, rank: int) -> bytes:
        """Return what a rank sends."""
        size = bytearray(8)
        self.receive_into(memoryview(size), rank)
        message = bytearray(int.from_bytes(size, "little"))
        self.receive_into(memoryview(message), rank)
        return bytes(message)

    def send_from(self, buffer: memoryview, rank: int, tag: int = 0) -> None:
        """Send the bytes of writable memory to one rank, which calls `receive_into` with as many."""
        self._transfer("send", buffer, rank, tag)

    def receive_into(self, buffer: memoryview, rank: int, tag: int = 0) -> None:
        """Fill memory with what a rank sends by the same tag."""
        self._transfer("recv", buffer, rank, tag)

    def receive_from_any(self, buffer: memoryview, tag: int) -> None:
        """Fill memory with the next message of that tag, however long it takes, also if a rank dies meanwhile."""
        import torch

        self._group.recv_anysource([torch.frombuffer(buffer, dtype=torch.uint8)], tag).wait(
            _FOREVER
        )

    def _transfer(
        self, method: Literal["send", "recv"], buffer: memoryview, rank: int, tag: int
    ) -> None:
        import torch

        if self._broken is not None:
            raise LostRankError(
                f"this Checkpointer has lost the other ranks ({self._broken}); expected that all ranks close it and "
                "make a new one"
            )
        if not len(buffer):
            return
        try:
            getattr(self._group, method)(
                [torch.frombuffer(buffer, dtype=torch.uint8)], rank, tag
            ).wait()
        except RuntimeError as error:
            is_late = "timed out" in str(error).lower()
            reason = (
                "died, or stopped waiting for another rank that its own error names"
                if rank == 0
                else "died"
            )
            if is_late:
                reason = f"did not answer within {self._timeout_s:g} s"
            message = f"rank {rank} of {self.size} {reason}"
            if (
                is_late or rank == 0
            ):  # gloo closes all connections of a process in which one times out
                self._broken = message
            raise LostRankError(message) from error


def open_group(process_group: ProcessGroupArgument, timeout_s: float) -> RankGroup:
    """Return the group to save and load with: that of torch.distributed where there is one."""
    if process_group is None:
        return RankGroup()
    import torch.distributed as dist

    if process_group == "world":
        if not (dist.is_available() and dist.is_initialized()):
            return RankGroup()
        process_group = dist.group.WORLD
    assert process_group is not None
    if dist.get_rank(process_group) < 0:
        raise ValueError(
            "process_group does not contain this process; expected a group of which it is a rank"
        )
    return (
        RankGroup()
        if dist.get_world_size(process_group) == 1
        else TorchGroup(process_group, timeout_s)
    )


def exchange(
    group: RankGroup,
    act: Callable[[], Any],
    decide: Callable[[list[Any]], Sequence[Any]],
    *,
    error_kind: str = "",
) -> Any:
    """Return the root's reply to what `act` returned here; `decide` makes, at the root, the replies to all ranks.

    Both are values that JSON holds. A rank whose `act` fails raises its error; the others raise one of that kind (or of
    `error_kind`) that names the rank. What `decide` raises is raised on all ranks.
    """
    value, error = attempt(act)
    message: Message = {"value": value} if error is None else _error_message(error)

    def answer() -> Sequence[Any]:
        messages = [message, *map(json.loads, group.gather(b"")[1:])]
        failed = {rank: message for rank, message in enumerate(messages) if "error" in message}
        if failed:
            text = "; ".join(f"rank {rank}: {message['error']}" for rank, message in failed.items())
            raise _error_of(
                {"error": text, "kind": error_kind or next(iter(failed.values()))["kind"]}
            )
        return decide([message["value"] for message in messages])

    reply, failure = attempt(lambda: _ask_root(group, answer, message))
    if error is not None:
        raise error
    if failure is not None:
        raise failure
    return reply


def all_succeed(group: RankGroup, act: Callable[[], T]) -> T:
    """Run `act` on every rank; return what it returned here if none failed, else raise on all ranks."""
    results: list[T] = []
    exchange(
        group, lambda: results.append(act()), lambda values: values, error_kind="CheckpointError"
    )
    return results[0]


def any_rank(group: RankGroup, is_so: bool) -> bool:
    """Return, on all ranks, whether it is so on any of them."""
    return exchange(group, lambda: is_so, lambda values: [any(values)] * len(values))


def root_decides(group: RankGroup, decide: Callable[[], T]) -> T:
    """Return what `decide` returns, or raise, at the root; a value that JSON holds."""
    return _ask_root(group, lambda: [decide()] * group.size)


def _ask_root(
    group: RankGroup, answer: Callable[[], Sequence[Any]], sent: Message | None = None
) -> Any:
    """Return the root's answer to this rank, after sending `sent`; what `answer` raises is raised on all ranks."""
    if group.rank != 0:
        if sent is not None:
            group.gather(_encode(sent))
        message = json.loads(group.scatter([]))
        if "error" in message:
            raise _error_of(message)
        return message["value"]
    answers, error = attempt(answer)
    if error is not None:
        group.scatter([_encode(_error_message(error))] * group.size)
        raise error
    group.scatter([b"", *(_encode({"value": value}) for value in answers[1:])])
    return answers[0]


def attempt(act: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """Return what `act` returns, or the error that it raises."""
    try:
        return act(), None
    except Exception as error:  # raised by the caller, once the other ranks have heard of it
        return None, error


def _error_message(error: Exception) -> Message:
    return {"error": str(error) or repr(error), "kind": type(error).__name__}


def _error_of(message: Message) -> Exception:
    """Return what another rank raised, as the same kind of error where it is one of ours."""
    kinds = {"ValueError": ValueError, "TypeError": TypeError}
    error_class = (
        kinds.get(message["kind"]) or getattr(errors, message["kind"], None) or CheckpointWriteError
    )
    return error_class(message["error"])


def _encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()
