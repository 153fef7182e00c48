"""A pipe out of another process, of which a bounded part is kept."""

import asyncio
import os
from collections.abc import Callable
from typing import Self


class OutputPipe:
    """Made before the other process, which is given ``write_fd``; read by this event loop.

    Args:
        max_bytes: most that is read.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        read_fd, self.write_fd = os.pipe()
        self._file = os.fdopen(read_fd, "rb", buffering=0)
        self._is_ours = True
        self.data = bytearray()
        """What has come so far."""
        self.too_much = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_write_end()
        self._file.close()

    async def read(self, *, on_too_much: Callable[[], None] | None = None) -> None:
        """Read to the end, or to ``max_bytes``. Call it once the other process has its own copy of ``write_fd``."""
        self._close_write_end()
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self._file)
        try:
            while part := await reader.read(1 << 16):
                self.data += part[: self._max_bytes - len(self.data)]
                if len(self.data) == self._max_bytes:
                    self.too_much = True
                    if on_too_much is not None:
                        on_too_much()
                    return
        finally:
            transport.close()

    def _close_write_end(self) -> None:
        if self._is_ours:
            self._is_ours = False
            os.close(self.write_fd)
