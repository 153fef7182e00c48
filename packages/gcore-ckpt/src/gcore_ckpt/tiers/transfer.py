"""Files of a step from rank to rank: copies that are made after a save, parts that others read during a load."""

import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count

import numpy as np

from gcore_ckpt.errors import LostRankError
from gcore_ckpt.format import validation
from gcore_ckpt.ranks.group import TorchGroup, attempt
from gcore_ckpt.saving.host_memory import allocate
from gcore_ckpt.storage import INDEX_FILE, StepFiles
from gcore_ckpt.threads import Outcome, Workers
from gcore_ckpt.tiers.machines import Machines

_logger = logging.getLogger(__name__)

_REQUEST_TAG = 1
_FIRST_REPLY_TAG = 2
_REPLY_THREADS = 4


def exchange_copies(
    group: TorchGroup,
    machines: Machines,
    replicas: int,
    sizes: Mapping[str, int],
    read: Callable[[str, memoryview], None],
    write: Callable[[str, memoryview], None],
) -> dict[str, int]:
    """Copy each rank's files to ranks of the next `replicas` machines; return the sizes of the files received here.

    `read` fills memory with a file of this rank, of which `sizes` are all; `write` keeps one of another. A rank that
    cannot do so goes through all messages nevertheless, so that no other one waits for it, and raises its error then.
    """
    received: dict[str, int] = {}
    errors: list[Exception] = []

    def note_error(act: Callable[[], None]) -> None:
        _, error = attempt(act)
        if error is not None:
            errors.append(error)

    def send(target: int) -> None:
        group.send(json.dumps(dict(sizes)).encode(), target)
        for name, size_bytes in sizes.items():
            buffer = allocate(size_bytes).data
            note_error(partial(read, name, buffer))
            group.send_from(buffer, target)
            del buffer  # before there is memory for the next file

    def receive(source: int) -> None:
        coming: dict[str, int] = json.loads(group.receive(source))
        for name, size_bytes in coming.items():
            buffer = allocate(size_bytes).data
            group.receive_into(buffer, source)
            note_error(partial(write, validation.plain_name(name), buffer))
            del buffer
        received.update(coming)

    # In turn: of ranks that send to one other at a time, none waits for itself in a circle.
    for distance in range(1, min(replicas, len(machines.ranks) - 1) + 1):
        with Workers(1) as sender:
            sending = sender.submit(partial(send, machines.target(group.rank, distance)))
            try:
                for source in machines.sources(group.rank, distance):
                    receive(source)
            finally:
                sending.wait()
            sending.result()
    if errors:
        raise errors[0]
    return received


class PeerFiles:
    """The files of a step for one rank while all ranks load it: from its own machine, or from the rank that has them.

    Each rank also answers the requests of the others, by threads of its own, from `start` until all call `stop`.

    Args:
        group: The ranks; nothing else uses it.
        local_files: What this rank's machine holds of the step; None if nothing.
        sources: The size of each file, and the rank to ask for it, or -1; the files are the same on all ranks.
    """

    def __init__(
        self,
        group: TorchGroup,
        local_files: StepFiles | None,
        sources: Mapping[str, tuple[int, int]],
        where: str,
    ) -> None:
        self._group = group
        self._local_files = local_files
        self._sources = sources
        self._names = sorted(sources)
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._where = where
        self._tags = count(_FIRST_REPLY_TAG)
        self._server = Workers(1)
        self._replies = Workers(_REPLY_THREADS)
        self._serving: Outcome[None] | None = None

        for name, (_, rank) in sources.items():
            if local_files is not None and rank < 0 and name != INDEX_FILE:
                local_files.open(name)

    def start(self) -> None:
        """Answer what others ask for."""
        self._serving = self._server.submit(self._serve)

    def stop(self) -> None:
        """End the answers, once no rank asks any more: each rank ends those of the next one."""
        self._ask((self._group.rank + 1) % self._group.size, -1, 0, 0, 0)
        if self._serving is not None:
            self._serving.wait()
        self._server.close()
        self._replies.close()

    def read_index(self) -> bytes:
        size_bytes, rank = self._sources[INDEX_FILE]
        if rank < 0 and self._local_files is not None:
            return self._local_files.read_index()
        data = bytearray(size_bytes)
        return bytes(data[: self.read_into(INDEX_FILE, 0, memoryview(data))])

    def open(self, name: str) -> int:
        if name not in self._sources:
            raise FileNotFoundError(f"{self._where} holds no {name}")
        return self._sources[name][0]

    def read_into(self, name: str, offset_bytes: int, buffer: memoryview) -> int:
        size_bytes, rank = self._sources[name]
        if rank < 0 and self._local_files is not None:
            return self._local_files.read_into(name, offset_bytes, buffer)
        buffer = buffer[: max(0, size_bytes - offset_bytes)]
        tag = next(self._tags)
        self._ask(rank, self._numbers[name], offset_bytes, len(buffer), tag)
        size_read = np.empty(1, np.int64)
        self._group.receive_into(size_read.view(np.uint8).data, rank, tag)
        if size_read[0] < 0:
            raise OSError(
                f"rank {rank} cannot read {self._where}/{name} for this rank; its log says why"
            )
        self._group.receive_into(buffer[: int(size_read[0])], rank, tag)
        return int(size_read[0])

    def _ask(self, rank: int, *request: int) -> None:
        message = np.array([self._group.rank, *request], np.int64)
        self._group.send_from(message.view(np.uint8).data, rank, _REQUEST_TAG)

    def _serve(self) -> None:
        request = np.empty(5, np.int64)
        while True:
            self._group.receive_from_any(request.view(np.uint8).data, _REQUEST_TAG)
            rank, number, offset_bytes, size_bytes, tag = map(int, request)
            if number < 0:
                return
            self._replies.submit(
                partial(self._reply, rank, self._names[number], offset_bytes, size_bytes, tag)
            )

    def _reply(self, rank: int, name: str, offset_bytes: int, size_bytes: int, tag: int) -> None:
        data = np.empty(size_bytes, np.uint8)
        size_read, error = attempt(partial(self._read_own, name, offset_bytes, data.data))
        if error is not None:
            _logger.error("%s/%s cannot be read for rank %d: %s", self._where, name, rank, error)
        try:
            size = np.array([-1 if error is not None else size_read], np.int64)
            self._group.send_from(size.view(np.uint8).data, rank, tag)
            self._group.send_from(data[: size_read or 0].data, rank, tag)
        except LostRankError as lost:
            _logger.error("%s/%s was read for a rank in vain: %s", self._where, name, lost)

    def _read_own(self, name: str, offset_bytes: int, buffer: memoryview) -> int:
        if self._local_files is None:
            raise FileNotFoundError(f"this machine holds nothing of {self._where}")
        if name != INDEX_FILE:
            return self._local_files.read_into(name, offset_bytes, buffer)
        data = self._local_files.read_index()[offset_bytes:][: len(buffer)]
        buffer[: len(data)] = data
        return len(data)
