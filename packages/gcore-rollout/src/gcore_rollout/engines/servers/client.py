"""HTTP client of an engine's server: one connection a call, and errors that name the server."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gcore_rollout.errors import EngineDiedError, ServerRequestError, make_extra_error

if TYPE_CHECKING:
    import aiohttp

_CONNECT_TIMEOUT_S = 30.0
_EVENT_END = b"\n\n"
_EVENT_START = b"data:"
_LAST_EVENT = b"[DONE]"


class ServerClient:
    """Calls one server. Nothing is ever sent twice: a request that was lost may have been served.

    Every call has a connection of its own. A server can close a kept connection in the moment in which it is used
    again, and whether the request arrived is then unknown; compared to a sample, connecting takes no time.

    Args:
        url: such as "http://10.0.0.7:8000".
        timeout_s: how long the server may be silent in a call.
        api_key: the key that the server was started with, if any.

    Raises a `RolloutError` if aiohttp is not installed.
    """

    def __init__(self, url: str, *, timeout_s: float, api_key: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url is {url!r}; expected http://HOST:PORT or https://HOST:PORT")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}; expected more than 0")
        if find_spec("aiohttp") is None:
            raise make_extra_error("aiohttp", "http")
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._headers: dict[str, str] = {}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def call_blocking(self, method: str, path: str, **arguments: Any) -> Any:
        """Call the server as `call` does, without an event loop or while one waits."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: asyncio.run(self.call(method, path, **arguments))).result()

    async def call(
        self, method: str, path: str, *, params: Mapping[str, str] | None = None, body: Any = None
    ) -> Any:
        """Call the server, and return the answer's JSON, or its text if it is not JSON.

        Raises:
            ServerRequestError: the server says 400 or above.
            EngineDiedError: it cannot be reached, hangs up, or says nothing for too long.
        """
        async with self._response(method, path, params=params, json=body) as response:
            async with self._losses():
                answer = (await response.read()).decode(errors="replace")
            try:
                return json.loads(answer)
            except ValueError:
                return answer

    async def events(
        self, path: str, body: Any, *, may_be_silent: Callable[[], bool]
    ) -> AsyncGenerator[Any]:
        """POST, and yield the JSON of each server-sent event, until the server reports the last one.

        Args:
            may_be_silent: called when nothing has come for ``timeout_s``; returns whether to continue waiting.

        Raises as `call` does, and an `EngineDiedError` when the stream breaks off.
        """
        async with self._response("POST", path, json=body) as response:
            buffer = b""
            while data := await self._read_more(response, may_be_silent):
                *events, buffer = (buffer + data).split(_EVENT_END)
                for event in events:
                    # Other lines are comments, which some servers send to keep a connection alive.
                    if not event.startswith(_EVENT_START):
                        continue
                    payload = event.removeprefix(_EVENT_START).strip()
                    if payload == _LAST_EVENT:
                        return
                    yield json.loads(payload)
        raise EngineDiedError(f"the server at {self.url} broke off a stream")

    async def _read_more(
        self, response: "aiohttp.ClientResponse", may_be_silent: Callable[[], bool]
    ) -> bytes:
        while True:
            try:
                async with self._losses():
                    return await response.content.readany()
            except EngineDiedError as error:
                if not (isinstance(error.__cause__, TimeoutError) and may_be_silent()):
                    raise

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, **content: Any
    ) -> AsyncGenerator["aiohttp.ClientResponse"]:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            async with self._losses():
                response = await session.request(method, self.url + path, **content)
            async with response:
                if response.status >= 400:
                    async with self._losses():
                        answer = (await response.read()).decode(errors="replace")
                    raise ServerRequestError(
                        f"{method} {self.url}{path}", status=response.status, answer=answer
                    )
                yield response

    @asynccontextmanager
    async def _losses(self) -> AsyncGenerator[None]:
        """Report a lost server, also one that is silent for ``timeout_s``, as an `EngineDiedError`."""
        import aiohttp

        try:
            async with asyncio.timeout(self.timeout_s):
                yield
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            how = f"said nothing for {self.timeout_s} s"
            if not isinstance(error, TimeoutError):
                how = f"was lost: {error or repr(error)}"
            raise EngineDiedError(f"the server at {self.url} {how}") from error
