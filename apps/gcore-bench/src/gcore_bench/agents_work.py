"""The servers of `gcore-bench agents`, and their clients."""

import asyncio
import json
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import aiohttp
from aiohttp import web

from gcore_agents import AgentServer, ChatCall, ChatEncoder, SampledTokens, Session, SessionBudget
from gcore_bench.harness.processes import Spec
from gcore_bench.harness.report import Figures
from gcore_llm.tiny_model import tiny_tokenizer

_Options: TypeAlias = Mapping[str, Any]
_Ask: TypeAlias = Callable[[str, dict[str, Any]], Awaitable[Mapping[str, Any]]]
"""Sends the body of a call to the session of a key, and returns the policy's message."""
_CALL = {"id": "call_0", "type": "function", "function": {"name": "tool_0", "arguments": "{}"}}


def run(spec: Spec) -> Figures:
    """Return the processor time of a contender's calls, in its process."""
    return asyncio.run(_measure(spec.contender, spec.options))


async def _measure(contender: str, options: _Options) -> Figures:
    engine = _Engine(options)
    sessions: dict[str, Session] = {}
    for number in range(options["sessions"]):
        session = engine.make_session(f"key-{number}")
        sessions[session.key] = session
    serve = {"bare aiohttp": _serve_ready_reply, "endpoint": _serve_endpoint}.get(contender, _play)
    # Imports and the first use of the template are no part of a call.
    await _play({"first": engine.make_session("first")}, options)
    engine.tokenization_s = 0.0
    start_s = time.process_time()
    await serve(sessions, options)
    cpu_s = time.process_time() - start_s - engine.tokenization_s
    num_calls = options["sessions"] * options["calls"]
    return {
        "calls": num_calls,
        "call_ms": cpu_s / num_calls * 1e3,
        "tokenization_ms": engine.tokenization_s / num_calls * 1e3,
    }


async def _serve_endpoint(sessions: Mapping[str, Session], options: _Options) -> None:
    server = AgentServer()
    await server.start()
    for session in sessions.values():
        server.open(session)
    await _run_clients(server.url, sessions, options)
    await server.close()


async def _serve_ready_reply(sessions: Mapping[str, Session], options: _Options) -> None:
    message = {"role": "assistant", "content": _make_text(options), "tool_calls": [_CALL]}
    reply = {"id": "resp", "model": "policy", "choices": [{"index": 0, "message": message}]}
    body = json.dumps(reply).encode()

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=body, content_type="application/json")

    app = web.Application(client_max_size=1 << 25)
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    await _run_clients(f"http://127.0.0.1:{runner.addresses[0][1]}", sessions, options)
    await runner.cleanup()


async def _play(sessions: Mapping[str, Session], options: _Options) -> None:
    """Make the calls in this process."""

    async def ask(key: str, body: dict[str, Any]) -> Mapping[str, Any]:
        [reply] = await sessions[key].respond(ChatCall(**body))
        sessions[key].mark_delivered([reply])
        return reply.message

    await _play_sessions(ask, list(sessions), options)


async def _run_clients(url: str, keys: Iterable[str], options: _Options) -> None:
    """Make the calls in another process, whose time does not count."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_run_client_process, args=(url, list(keys), dict(options)))
    process.start()
    await asyncio.to_thread(process.join)
    if process.exitcode:
        raise RuntimeError(f"the clients ended with code {process.exitcode}")


def _run_client_process(url: str, keys: list[str], options: _Options) -> None:
    asyncio.run(_call_server(url, keys, options))


async def _call_server(url: str, keys: list[str], options: _Options) -> None:
    connector = aiohttp.TCPConnector(limit=options["at_once"])
    async with aiohttp.ClientSession(url, connector=connector, raise_for_status=True) as http:

        async def ask(key: str, body: dict[str, Any]) -> Mapping[str, Any]:
            headers = {"Authorization": f"Bearer {key}"}
            async with http.post("/v1/chat/completions", json=body, headers=headers) as response:
                reply = await response.json()
            return reply["choices"][0]["message"]

        await _play_sessions(ask, keys, options)


async def _play_sessions(ask: _Ask, keys: Sequence[str], options: _Options) -> None:
    """Play all sessions, so many at once: conversations of a system message, turns and what answers them."""
    at_once = asyncio.Semaphore(options["at_once"])
    system = {"role": "system", "content": "s" * options["prompt_chars"]}
    result = {"role": "tool", "tool_call_id": "call", "content": _make_text(options)}
    tools = [_make_tool(number) for number in range(options["tools"])]

    async def play(key: str) -> None:
        async with at_once:
            messages = [system, {"role": "user", "content": _make_text(options)}]
            for _ in range(options["calls"]):
                turn = await ask(key, {"messages": list(messages), "tools": tools})
                messages += [turn, {**result, "tool_call_id": turn["tool_calls"][0]["id"]}]

    await asyncio.gather(*(play(key) for key in keys))


def _make_text(options: _Options) -> str:
    return "word " * (options["message_chars"] // 5)


def _make_tool(number: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"query": {"type": "string"}}}
    function = {"name": f"tool_{number}", "description": "d" * 100, "parameters": schema}
    return {"type": "function", "function": function}


class _Engine:
    """Answers each call with the same turn, and counts the processor time of tokenization."""

    def __init__(self, options: _Options) -> None:
        self.tokenization_s = 0.0
        self._encoder = ChatEncoder(tiny_tokenizer(chats=True))
        tokens = self._encoder.encode(f"{_make_text(options)}[tool_0 {{}}]<eos>")
        self._turn = SampledTokens(
            token_ids=tokens,
            log_probs=[-0.5] * len(tokens),
            weight_versions=[0] * len(tokens),
            finish_reason="stop",
        )
        for name in ("first", "next", "read_turn"):
            setattr(self._encoder, name, self._time(getattr(self._encoder, name)))

    def _time(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start_s = time.thread_time()
            result = function(*args, **kwargs)
            self.tokenization_s += time.thread_time() - start_s
            return result

        return call

    def make_session(self, key: str) -> Session:
        """Return a session that this engine answers."""
        budget = SessionBudget(max_tokens=1 << 24)
        return Session(session_id=key, key=key, sampler=self, encoder=self._encoder, budget=budget)

    async def sample(self, prompt_ids: Sequence[int], **options: Any) -> SampledTokens:
        """Return the turn."""
        del prompt_ids, options
        return self._turn
