"""The agent of a case: it calls an endpoint, and keeps what the endpoint shows of its trace."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import aiohttp

from gcore_agents.conformance.errors import CaseNotApplicableError, MismatchError
from gcore_agents.conformance.scripted import EngineCall, ScriptedEngine, check_message
from gcore_agents.conformance.trace import EndpointTrace, read_nodes
from gcore_agents.conformance.turns import ModelTurn, user
from gcore_agents.conformance.wire.client import (
    WireClient,
    WireReply,
    WireRequest,
    read_event_data,
)

_MAX_SHOWN = 300
_TIMEOUT_S = 600.0
ReadGraph: TypeAlias = Callable[[], Awaitable[Mapping[str, Any]]]


class CaseAgent:
    """Speaks to an endpoint by one API.

    Args:
        url: the endpoint's, without a path.
        key: of its session.
        engine: what answers; None: a model that is not known, whose turns may be any.
        script: what the engine's turns say.
        has_graph: whether the endpoint shows the graph of a session.
        read_graph: returns the graph in the form of ``GET /session/graph?tokens=1``; None: that path is asked.
        nonce: makes conversations of several cases on one session different.

    Example:
        >>> async def ask(agent: CaseAgent) -> str:
        ...     [reply] = await agent.send(WireRequest(messages=[agent.user("2 + 2 =")]))
        ...     return reply.text
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        *,
        url: str,
        key: str,
        client: WireClient,
        engine: ScriptedEngine | None = None,
        script: Sequence[ModelTurn] = (),
        has_graph: bool = True,
        read_graph: ReadGraph | None = None,
        model: str = "policy",
        nonce: str = "",
    ) -> None:
        self.client = client
        self.engine = engine
        self.trace = EndpointTrace()
        self._http = http
        self._url = url
        self._headers = {"Authorization": f"Bearer {key}"}
        self._script = script
        self._has_graph = has_graph
        self._read_graph = read_graph
        self._replies: list[WireReply] = []
        self._asks_reasoning = True
        """Whether calls ask for reasoning, which some dialects show only then."""
        self._model = model
        self._nonce = nonce

    def user(self, text: str) -> dict[str, Any]:
        """Return a message of the user."""
        return user(text + self._nonce)

    async def start(self) -> None:
        """Look at the graph before the first call."""
        await self._update_nodes()
        self.trace.first_node = len(self.trace.nodes or {})

    async def send(
        self, request: WireRequest, *, headers: Mapping[str, str] | None = None
    ) -> list[WireReply]:
        """Send a request, and check the reply.

        Raises:
            MismatchError: the endpoint refuses it, or the reply is not the engine's turn, or the graph has changed.
        """
        num_calls = len(self.trace.calls)
        replies = await self.exchange(request, headers=headers)
        is_whole = not request.stop and not request.prompt
        await self._check(replies, num_calls, is_whole=is_whole)
        return replies

    async def send_body(self, path: str, body: Any, *, stream: bool) -> list[WireReply]:
        """Send a body as it is, and check the reply as `send` does."""
        self._asks_reasoning = False
        num_calls = len(self.trace.calls)
        received = await self.post(path, body, stream=stream)
        replies = self._read_reply(received)
        await self._check(replies, num_calls, is_whole=True)
        return replies

    async def _check(self, replies: Sequence[WireReply], num_calls: int, *, is_whole: bool) -> None:
        """Check a reply and the graph after it; ``is_whole``: its text is all of the engine's turn."""
        if self.engine is not None:
            self.trace.calls[:] = self.engine.calls
            self._check_replies(replies, num_calls, is_whole=is_whole)
        await self._update_nodes()

    async def exchange(
        self, request: WireRequest, *, headers: Mapping[str, str] | None = None
    ) -> list[WireReply]:
        """Send a request with the agent's model, and return the reply without a check."""
        request = replace(request, model=self._model)
        body = self.client.write_body(request)
        received = await self.post(
            self.client.path(request), body, stream=request.stream, headers=headers
        )
        return self._read_reply(received)

    def _read_reply(self, received: Mapping[str, Any]) -> list[WireReply]:
        """Return the turns of a reply; without an engine and a graph, they are all that shows its calls."""
        replies = self.client.read_reply(received)
        self._replies.extend(replies)
        if self.engine is None and not self._has_graph:
            self._add_calls(replies)
        return replies

    async def post(
        self,
        path: str,
        body: Any,
        *,
        stream: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return the reply to a body; of a stream, what its events make."""
        async with self._http.post(
            self._url + path,
            json=body,
            headers={**self._headers, **(headers or {})},
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
        ) as response:
            text = await response.text()
            if response.status >= 400:
                first_words = " ".join(text.split())[:_MAX_SHOWN]
                raise MismatchError(f"HTTP {response.status}: {first_words}")
            if not stream:
                return await response.json()
            content_type = response.headers.get("Content-Type", "")
            if "text/event-stream" not in content_type:
                raise MismatchError(f"a stream was asked for, and the reply is {content_type!r}")
        return self.client.join_events(read_event_data(text.splitlines()))

    async def give_up(self, request: WireRequest, *, after_s: float) -> None:
        """Send a request, and close the connection before the reply is there."""
        task = asyncio.create_task(self.exchange(request))
        await asyncio.sleep(after_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def finish(self) -> None:
        """Look at the graph after the last call."""
        if self.engine is not None:
            self.trace.calls[:] = self.engine.calls
        await self._update_nodes()
        if self.engine is None and self._has_graph:
            self._read_calls()

    def expect(self, reply: WireReply, is_expected: bool, expected: str) -> None:
        """Raise an error if a reply is not as it should be; a model that is not known may reply anything."""
        if is_expected:
            return
        fault = f"the reply is {dict(reply.message)} with finish reason {reply.finish_reason!r}; expected {expected}"
        if self.engine is not None:
            raise MismatchError(fault[:_MAX_SHOWN])
        raise CaseNotApplicableError(fault[:_MAX_SHOWN])

    def _check_replies(
        self, replies: Sequence[WireReply], num_calls: int, *, is_whole: bool
    ) -> None:
        calls = self.trace.calls[num_calls:]
        if not calls or len(replies) != len(calls):
            # A reply that was there before, or a text that ends the session.
            return
        first = replies[0]
        num_tokens = sum(len(call.token_ids) for call in calls)
        counts = (first.prompt_tokens, first.completion_tokens)
        if any(counts) and counts != (len(calls[0].prompt_ids), num_tokens):
            raise MismatchError(
                f"usage is {counts[0]} and {counts[1]} tokens; expected {len(calls[0].prompt_ids)} and {num_tokens}"
            )
        for number, reply in enumerate(replies):
            if reply.token_ids is not None and reply.token_ids != calls[number].token_ids:
                raise MismatchError(
                    f"token_ids of the reply are not those of turn {num_calls + number}"
                )
            if not is_whole or reply.finish_reason == "length":
                continue
            turn = self._script[min(num_calls + number, len(self._script) - 1)]
            if "reasoning_content" not in reply.message and not self._asks_reasoning:
                turn = replace(turn, reasoning="")
            try:
                check_message(reply.message, turn)
            except CaseNotApplicableError as error:
                raise MismatchError(
                    f"turn {num_calls + number} as the client got it: {error}"
                ) from error

    def _add_calls(self, replies: Sequence[WireReply]) -> None:
        for reply in replies:
            if reply.prompt_ids is None or reply.token_ids is None:
                raise CaseNotApplicableError(
                    "replies have no prompt_token_ids and token_ids, and there is no graph of the session"
                )
            call = EngineCall(prompt_ids=reply.prompt_ids, token_ids=reply.token_ids)
            if call not in self.trace.calls:
                self.trace.calls.append(call)

    def _read_calls(self) -> None:
        """Take the engine's calls from the graph, and compare them with the replies."""
        nodes = self.trace.nodes or {}
        turns: dict[str, EngineCall] = {}
        for node in nodes.values():
            if node.is_turn and node.number >= self.trace.first_node:
                prompt = self.trace.path_before(node)
                call = EngineCall(prompt_ids=prompt, token_ids=node.token_ids)
                self.trace.calls.append(call)
                turns[node.response_id] = call
        for reply in self._replies:
            turn = turns.get(reply.response_id)
            if turn is None:
                continue
            if reply.token_ids is not None and reply.token_ids != turn.token_ids:
                raise MismatchError(f"token_ids of {reply.response_id} are not those of its node")
            if reply.prompt_tokens != len(turn.prompt_ids):
                raise MismatchError(
                    f"usage of {reply.response_id} is {reply.prompt_tokens} tokens of prompt; its path has "
                    f"{len(turn.prompt_ids)}"
                )

    async def _update_nodes(self) -> None:
        if self._has_graph:
            self.trace.update(read_nodes(await self._get_graph()))

    async def _get_graph(self) -> Mapping[str, Any]:
        if self._read_graph is not None:
            return await self._read_graph()
        async with self._http.get(
            f"{self._url}/session/graph?tokens=1", headers=self._headers
        ) as response:
            if response.status != 200:
                raise MismatchError(f"GET /session/graph: HTTP {response.status}")
            return await response.json()
