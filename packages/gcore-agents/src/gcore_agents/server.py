"""The endpoint of agents: one HTTP server for all sessions of a process. A session is a URL and a key."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from aiohttp import web

from gcore_agents.calls import ChatCall, ChatReply
from gcore_agents.dialects.anthropic import AnthropicDialect
from gcore_agents.dialects.chat_completions import ChatCompletionsDialect
from gcore_agents.dialects.completions import CompletionsDialect
from gcore_agents.dialects.dialect import MODEL, Dialect
from gcore_agents.dialects.fields import JsonFields, parse_json
from gcore_agents.dialects.google import GoogleDialect
from gcore_agents.dialects.responses import ResponsesDialect
from gcore_agents.errors import CallError
from gcore_agents.session import Session
from gcore_agents.session_api import (
    add_reward,
    close_session,
    describe_graph,
    describe_session,
    detokenize,
    tokenize,
)

_LOG = logging.getLogger(__name__)
_MAX_RELEASED = 1 << 16
"""Keys of former sessions that are remembered, so that stragglers are refused with 409 and not with 401."""
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
_SessionFunction: TypeAlias = Callable[[Session, JsonFields], dict[str, Any]]
_DIALECTS: dict[str, type[Dialect]] = {
    "/chat/completions": ChatCompletionsDialect,
    "/responses": ResponsesDialect,
    "/messages": AnthropicDialect,
    "/completions": CompletionsDialect,
}
"""Paths of calls; those of Google have the name of the model."""
_COUNTS: dict[str, type[Dialect]] = {
    "/messages/count_tokens": AnthropicDialect,
    "/responses/input_tokens": ResponsesDialect,
}
_VERSIONS = ("/v1", "", "/v1/v1")
"""The last is what clients call that add a version of their own to OpenAI's base URL."""
_GOOGLE_VERSIONS = ("/v1beta", "/v1alpha", *_VERSIONS, "/v1/v1beta", "/v1/v1alpha")


class _ServedSession:
    """A session, and the dialects that its agent may speak."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.responses = ResponsesDialect(session)
        self.dialects: dict[type[Dialect], Dialect] = {
            ChatCompletionsDialect: ChatCompletionsDialect(session),
            ResponsesDialect: self.responses,
            AnthropicDialect: AnthropicDialect(session),
            CompletionsDialect: CompletionsDialect(session),
            GoogleDialect: GoogleDialect(session),
        }


class AgentServer:
    """Serves sessions to agents by the APIs that their SDKs speak.

    A call is of the session whose key it has: as ``Authorization: Bearer``, ``x-api-key``, ``x-goog-api-key`` or
    ``?key=``; or in its path, after ``/s/``. Keys are not logged. Several agents of a session name themselves by the
    header ``x-gcore-agent``, or in the path, after ``/a/``.

    Args:
        host: address to listen on.
        port: 0: the kernel chooses one.
        advertise_host: name of this machine for agents on others; empty: ``host``.
        keep_alive_s: seconds of silence after which a stream gets a comment.
        max_body_bytes: longest body of a call.

    Example:
        >>> async def run(session: Session) -> None:
        ...     server = AgentServer()
        ...     await server.start()
        ...     client = openai.AsyncOpenAI(base_url=server.open(session), api_key=session.key)
        ...     await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hi."}])
        ...     await server.close()
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise_host: str = "",
        keep_alive_s: float = 10.0,
        max_body_bytes: int = 32 << 20,
    ) -> None:
        if keep_alive_s <= 0:
            raise ValueError(f"keep_alive_s is {keep_alive_s}; expected more than 0")
        self.keep_alive_s = keep_alive_s
        self._host = host
        self._port = port
        self._advertise_host = advertise_host or host
        self._sessions: dict[str, _ServedSession] = {}
        self._released: dict[str, None] = {}
        app = web.Application(client_max_size=max_body_bytes)
        self._add_routes(app)
        # A session has to know which clients wait for a reply.
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True
        )

    async def start(self) -> None:
        """Listen for calls."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Close all sessions and their connections."""
        for key in list(self._sessions):
            self.release(self._sessions[key].session)
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        """Address without a path, such as Anthropic's and Google's SDKs want it."""
        return f"http://{self._advertise_host}:{self._port}"

    def open(self, session: Session) -> str:
        """Serve a session, and return the base URL of OpenAI's API; the key is ``session.key``."""
        self._sessions[session.key] = _ServedSession(session)
        return f"{self.url}/v1"

    def session_url(self, session: Session, *, agent: str = "") -> str:
        """Return a base URL that needs no key, for agents that cannot be given one; it may name the agent."""
        agent_path = f"/a/{agent}" if agent else ""
        return f"{self.url}/s/{session.key}{agent_path}/v1"

    def release(self, session: Session) -> None:
        """Close a session, and serve it no longer; later calls get status 409."""
        session.close()
        self._sessions.pop(session.key, None)
        self._released[session.key] = None
        if len(self._released) > _MAX_RELEASED:
            self._released.pop(next(iter(self._released)))

    def _add_routes(self, app: web.Application) -> None:
        router = app.router
        for path in ("/", "/health"):
            router.add_get(path, _report_health)
        for prefix in ("", "/s/{key}", "/a/{agent}", "/s/{key}/a/{agent}"):
            for version in _VERSIONS:
                self._add_api_routes(router, prefix + version)
                self._add_session_routes(router, prefix + version)
            for version in _GOOGLE_VERSIONS:
                path = f"{prefix}{version}/models/{{model:.+}}:{{action}}"
                router.add_post(path, self._answer_google)
        router.add_route("*", "/{path:.*}", _refuse_path)

    def _add_api_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        for path, dialect_type in _DIALECTS.items():
            router.add_post(prefix + path, partial(self._answer_call, dialect_type))
        for path, dialect_type in _COUNTS.items():
            router.add_post(prefix + path, partial(self._count_tokens, dialect_type))
        router.add_get(f"{prefix}/responses/{{response_id}}", self._show_response)
        router.add_get(f"{prefix}/models", partial(self._use_session, _list_models))
        router.add_get(f"{prefix}/models/{{model}}", partial(self._use_session, _describe_model))

    def _add_session_routes(self, router: web.UrlDispatcher, prefix: str) -> None:
        for path, function in (("", describe_session), ("/graph", describe_graph)):
            router.add_get(f"{prefix}/session{path}", partial(self._use_session, function))
        for path, function in (("reward", add_reward), ("close", close_session)):
            router.add_post(f"{prefix}/session/{path}", partial(self._use_session, function))
        for path, function in (("tokenize", tokenize), ("detokenize", detokenize)):
            router.add_post(f"{prefix}/{path}", partial(self._use_session, function))

    def _find(self, request: web.Request) -> _ServedSession:
        """Return the session of a call; `CallError` if its key is unknown, or the session is closed."""
        authorization = request.headers.get("Authorization", "")
        keys = [
            request.match_info.get("key", ""),
            authorization.strip().rpartition(" ")[2],
            request.headers.get("x-api-key", ""),
            request.headers.get("x-goog-api-key", ""),
            request.query.get("key", ""),
        ]
        for key in keys:
            if key in self._sessions:
                return self._sessions[key]
        if any(key in self._released for key in keys):
            raise CallError("the session is closed", status=409, code="session_closed")
        raise CallError(
            "the API key is of no session; expected the key of an open one",
            status=401,
            code="invalid_api_key",
        )

    async def _answer_google(self, request: web.Request) -> web.StreamResponse:
        action = request.match_info["action"]
        if action == "countTokens":
            return await self._count_tokens(GoogleDialect, request)
        if action not in ("generateContent", "streamGenerateContent"):
            error = CallError(f"{action} is not supported; expected generateContent", status=404)
            return _make_error_response(GoogleDialect, error)
        is_stream = action == "streamGenerateContent"
        return await self._answer_call(GoogleDialect, request, is_stream=is_stream)

    async def _count_tokens(
        self, dialect_type: type[Dialect], request: web.Request
    ) -> web.Response:
        try:
            dialect = self._find(request).dialects[dialect_type]
            return web.json_response(dialect.count_tokens(await _read_body(request)))
        except Exception as error:
            return _make_error_response(dialect_type, error)

    async def _show_response(self, request: web.Request) -> web.Response:
        try:
            dialect = self._find(request).responses
            return web.json_response(dialect.find_response(request.match_info["response_id"]))
        except Exception as error:
            return _make_error_response(ResponsesDialect, error)

    async def _answer_call(
        self, dialect_type: type[Dialect], request: web.Request, *, is_stream: bool = False
    ) -> web.StreamResponse:
        """Answer a call; ``is_stream``: its path says that it wants a stream."""
        try:
            dialect = self._find(request).dialects[dialect_type]
        except CallError as error:
            return _make_error_response(dialect_type, error)
        try:
            call = _read_headers(request, dialect.read_call(await _read_body(request)))
            if call.stream or is_stream:
                return await self._stream(request, dialect, call)
            replies = await dialect.session.respond(call)
            headers = _make_headers(replies)
            response = web.json_response(dialect.write_reply(call, replies), headers=headers)
        except Exception as error:
            dialect.session.last_error = str(error)
            return _make_error_response(dialect_type, error)
        with suppress(ConnectionError):
            await response.prepare(request)
            await response.write_eof()
            dialect.session.mark_delivered(replies)
        return response

    async def _stream(
        self, request: web.Request, dialect: Dialect, call: ChatCall
    ) -> web.StreamResponse:
        """Write a reply as events, after comments while it takes long.

        An error is raised if nothing has been written yet, and is an event later.
        """
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        answer = asyncio.ensure_future(dialect.session.respond(call))
        try:
            while not (await asyncio.wait({answer}, timeout=self.keep_alive_s))[0]:
                await response.prepare(request)
                await response.write(dialect.keep_alive)
            replies: list[ChatReply] = []
            try:
                replies = answer.result()
                events = list(dialect.write_events(call, replies))
            except Exception as error:
                if not response.prepared:
                    raise
                events = [dialect.write_error_event(_to_call_error(error))]
            if not response.prepared:
                response.headers.update(_make_headers(replies))
            await response.prepare(request)
            for event in events:
                await response.write(event)
            await response.write_eof()
            dialect.session.mark_delivered(replies)
        except ConnectionError:
            # The client has gone away: the turn stays undelivered until its retry.
            pass
        finally:
            answer.cancel()
        return response

    async def _use_session(self, function: _SessionFunction, request: web.Request) -> web.Response:
        try:
            session = self._find(request).session
            values: Any = dict(request.query)
            if request.method == "POST":
                values = await _read_body(request)
            fields = JsonFields(values)
            fields.values.update(request.match_info)
            return web.json_response(function(session, fields))
        except Exception as error:
            return _make_error_response(Dialect, error)


async def _report_health(request: web.Request) -> web.Response:
    del request
    return web.json_response({"status": "ok"})


async def _refuse_path(request: web.Request) -> web.Response:
    calls = ", ".join(_DIALECTS)
    error = CallError(
        f"{request.method} {request.path} is not served; expected POST with one of {calls} after the base URL, or "
        "another route of the HTTP API",
        status=404,
        code="not_found",
    )
    return _make_error_response(Dialect, error)


async def _read_body(request: web.Request) -> Any:
    try:
        body = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise CallError(f"the body is too long: {error.text}", status=413, field="body") from None
    except web.RequestPayloadError as error:
        raise CallError(f"the body cannot be read: {error}", field="body") from None
    return parse_json(body, "body")


def _read_headers(request: web.Request, call: ChatCall) -> ChatCall:
    """Return a call with what its headers say about retries and, as its path may, about its agent."""
    headers = request.headers
    count = headers.get("x-stainless-retry-count", "")
    return replace(
        call,
        is_retry=count.isdecimal() and int(count) > 0,
        retry_key=headers.get("Idempotency-Key", ""),
        agent=request.match_info.get("agent", headers.get("x-gcore-agent", "")),
    )


def _make_headers(replies: Sequence[ChatReply]) -> dict[str, str]:
    """Return headers that name the turns, also under the names that SDKs show."""
    ids = ",".join(reply.response_id for reply in replies)
    return {"x-gcore-response-id": ids, "x-request-id": ids, "request-id": ids}


def _to_call_error(error: Exception) -> CallError:
    if isinstance(error, CallError):
        return error
    _LOG.error("a call failed", exc_info=error)
    return CallError(
        f"the endpoint failed: {type(error).__name__}", status=500, code="internal_error"
    )


def _make_error_response(dialect_type: type[Dialect], error: Exception) -> web.Response:
    call_error = _to_call_error(error)
    return web.json_response(dialect_type.write_error(call_error), status=call_error.status)


def _list_models(session: Session, fields: JsonFields) -> dict[str, Any]:
    models = [_describe_model(session, fields)]
    return {"object": "list", "data": models, "has_more": False}


def _describe_model(session: Session, fields: JsonFields) -> dict[str, Any]:
    """Return a model in the forms of OpenAI and Anthropic at once."""
    del session
    name = fields.read_text("model") or MODEL
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "gcore",
    }
