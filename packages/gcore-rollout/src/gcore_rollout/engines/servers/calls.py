"""The calls of a server, which each kind of server has in its own way."""

import uuid
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from gcore_rollout.engines.queueing import QueueingEngine
from gcore_rollout.engines.servers.client import ServerClient
from gcore_rollout.engines.servers.model import ServedModel, ServerInfo
from gcore_rollout.engines.servers.sample import Piece, RunningSample
from gcore_rollout.errors import ServerRequestError


class ServerCalls(QueueingEngine):
    """The base of `ServerEngine`: the server, its model, and the calls that a subclass for a kind of server defines."""

    _HOW_TO_OPEN = "connect again"
    _GENERATE_PATH: ClassVar[str]
    _ENDS_PAUSED_SAMPLES: ClassVar[bool]
    """Whether the server answers an abort while it is paused."""

    def __init__(
        self, client: ServerClient, info: ServerInfo, model: ServedModel, *, eos_token_ids: Sequence[int]
    ) -> None:
        super().__init__()
        self._client = client
        self._info = info
        self._model = model
        self._eos = list(eos_token_ids)
        # Servers keep prefixes computed with older weights, also of an earlier client: each version has its own.
        self._identity = uuid.uuid4().hex

    def _failure(self, running: RunningSample, *, status: int, answer: str) -> ServerRequestError:
        """What to raise when a stream says that its sample failed."""
        sample = running.sample
        name = f"sample {sample.index} of {sample.request.request_id!r}, POST {self._client.url}{self._GENERATE_PATH}"
        return ServerRequestError(name, status=status, answer=answer)

    @property
    def _cache_salt(self) -> str:
        return f"{self._identity}-{self._version}"

    @classmethod
    @abstractmethod
    def _ask(cls, client: ServerClient) -> ServerInfo:
        """What the server runs; refuse one that was started without what is needed. Blocks."""

    @abstractmethod
    def _take_over(self) -> None:
        """Have the server as `connect` says, however others have left it. Blocks."""

    @abstractmethod
    def _body(self, running: RunningSample) -> dict[str, Any]:
        """What is sent to ``_GENERATE_PATH``."""

    @abstractmethod
    def _reader(self, running: RunningSample) -> Callable[[Any], Piece]:
        """What reads the events of the answer, one by one. It raises `ServerRequestError` if one says so."""

    @abstractmethod
    def _abort_on_server(self, server_ids: Sequence[str]) -> Awaitable[None]:
        """End samples; unknown ones, and an empty list, are nothing."""

    @abstractmethod
    def _pause_server(self) -> Awaitable[None]:
        """Return when no step runs any more; idempotent."""

    @abstractmethod
    def _resume_server(self) -> Awaitable[None]: ...

    @abstractmethod
    def _sleep_server(self) -> Awaitable[None]: ...

    @abstractmethod
    def _wake_server(self) -> Awaitable[None]: ...

    @abstractmethod
    def _check_update_possible(self) -> Awaitable[None]:
        """Refuse an update after which the server would be wrong."""

    @abstractmethod
    def _load_on_server(self, folder: Path, version: int) -> Awaitable[None]:
        """Load a folder's weights while paused; tokens sampled afterwards are said to be of ``version``."""
