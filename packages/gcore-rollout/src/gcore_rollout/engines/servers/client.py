"""HTTP to an engine's server: one connection a call, answers checked, losses named."""

import asyncio
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from gcore_rollout.errors import EngineDiedError, MissingExtraError, ServerRequestError

if TYPE_CHECKING:
    import aiohttp

_CONNECT_TIMEOUT_S = 30.0
_EVENT_END = b"\n\n"
_EVENT_START = b"data:"
_LAST_EVENT = b"[DONE]"


class ServerClient:
    """Calls one server. Nothing is ever sent twice: a request that was lost may have been served.

    Every call has a connection of its own. One that is kept can be closed by the server in the moment in which it is
    used again, and whether the request arrived is then unknown; beside what a sample takes, connecting is nothing.

    Args:
        url: such as "http://10.0.0.7:8000".
        timeout_s: how long the server may be silent in a call.
        api_key: what the server was started with, if it asks for one.

    Raises:
        MissingExtraError: aiohttp is not installed.
        ValueError: ``url`` is not one.
    """

    def __init__(self, url: str, *, timeout_s: float, api_key: str | None = None) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url is {url!r}; expected http://HOST:PORT or https://HOST:PORT")
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}; expected more than 0")
        try:
            # Only whether it is there is asked; what is used of it is imported where it is used.
            import aiohttp  # noqa: F401  # pyright: ignore[reportUnusedImport]
        except ModuleNotFoundError as error:
            if error.name != "aiohttp":
                raise
            raise MissingExtraError("aiohttp", "http") from error
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def call_blocking(
        self, method: str, path: str, *, params: Mapping[str, str] | None = None, body: Any = None
    ) -> Any:
        """The same as `call`, without an event loop."""
        query = f"?{urlencode(params)}" if params else ""
        request = urllib.request.Request(
            self.url + path + query,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={**self._headers, "Content-Type": "application/json"},
        )
        # A proxy from the environment is not for servers of the same cluster; aiohttp asks for none either.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self.timeout_s) as response:
                return _decoded(response.read())
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(method, path, error.code, error.read()) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._loss(error) from error

    async def call(self, method: str, path: str, *, params: Mapping[str, str] | None = None, body: Any = None) -> Any:
        """Returns: the answer's JSON, or its text where it is not JSON.

        Raises:
            ServerRequestError: the server says 400 or above.
            EngineDiedError: it cannot be reached, hangs up, or says nothing for too long.
        """
        async with self._response(method, path, params=params, body=body) as response, self._losses():
            async with asyncio.timeout(self.timeout_s):
                return _decoded(await response.read())

    async def events(self, path: str, body: Any, *, may_be_silent: Callable[[], bool]) -> AsyncGenerator[Any]:
        """POST, and yield the JSON of each server-sent event, until the server says that there are no more.

        Args:
            may_be_silent: asked when nothing has come for ``timeout_s``: whether to go on waiting.

        Raises:
            ServerRequestError: as in `call`.
            EngineDiedError: as in `call`, and when the stream breaks off.
        """
        async with self._response("POST", path, body=body) as response:
            buffer = b""
            while data := await self._more(response, may_be_silent):
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

    async def _more(self, response: "aiohttp.ClientResponse", may_be_silent: Callable[[], bool]) -> bytes:
        async with self._losses():
            while True:
                try:
                    async with asyncio.timeout(self.timeout_s):
                        return await response.content.readany()
                except TimeoutError:
                    if not may_be_silent():
                        raise

    @asynccontextmanager
    async def _response(
        self, method: str, path: str, *, params: Mapping[str, str] | None = None, body: Any = None
    ) -> AsyncGenerator["aiohttp.ClientResponse"]:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as session:
            async with self._losses(), asyncio.timeout(self.timeout_s):
                response = await session.request(method, self.url + path, params=params, json=body)
            async with response:
                if response.status >= 400:
                    async with self._losses():
                        raise self._refusal(method, path, response.status, await response.read())
                yield response

    @asynccontextmanager
    async def _losses(self) -> AsyncGenerator[None]:
        import aiohttp

        try:
            yield
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._loss(error) from error

    def _loss(self, error: Exception) -> EngineDiedError:
        if isinstance(error, TimeoutError):
            return EngineDiedError(f"the server at {self.url} said nothing for {self.timeout_s} s")
        return EngineDiedError(f"the server at {self.url} was lost: {error or repr(error)}")

    def _refusal(self, method: str, path: str, status: int, answer: bytes) -> ServerRequestError:
        return ServerRequestError(f"{method} {self.url}{path}", status=status, answer=answer.decode(errors="replace"))


def _decoded(answer: bytes) -> Any:
    try:
        return json.loads(answer)
    except ValueError:
        return answer.decode(errors="replace")
