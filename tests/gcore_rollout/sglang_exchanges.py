"""Talk between `SGLangServerEngine` and a real server: recorded on the way, and given again without the server."""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import aiohttp
from aiohttp import web
from engine_oracles import Found, TinyModel, collect, go_on, interrupt, make_request, until_sampled
from server_processes import free_port

from gcore_rollout import Engine, RepetitionDetection, Request

RECORDED = Path(__file__).parent / "recorded" / "sglang-0.5.23.jsonl"

_KEPT_OF_SERVER_INFO = ("model_path", "disable_overlap_schedule", "max_req_input_len")
_KEPT_OF_META_INFO = (
    "finish_reason",
    "completion_tokens",
    "output_token_logprobs",
    "weight_versions",
)


@dataclass
class Exchange:
    """One call and its answer."""

    method: str
    path: str
    body: Any
    status: int = 0
    answer: Any = None
    """JSON or text; none for a stream."""
    events: list[tuple[int, Any]] = field(default_factory=list[tuple[int, Any]])
    """Of a stream: how many calls the server had got before it sent this, and what it sent."""


@dataclass
class Scenario:
    """What the scenario asked for, by the weights that are to have answered, and all that came."""

    by_old: list[Request]
    by_new: list[Request]
    crossing: Request
    cut: Found
    found: Found


async def run_scenario(engine: Engine, model: TinyModel) -> Scenario:
    """Every call of an engine, in an order that does not depend on time."""
    plain = make_request("plain", 5, n=2, seed=1, max_tokens=5)
    greedy = make_request("greedy", 7, max_tokens=5, temperature=0)
    found = await collect(engine, plain, greedy)

    long = make_request("long", 9, seed=2, max_tokens=16, temperature=0)
    cut = await interrupt(engine, long, after=4)
    found |= await collect(engine, go_on(long, cut))

    crossing = make_request("crossing", 12, seed=3, max_tokens=16, temperature=0)
    running = asyncio.create_task(collect(engine, crossing))
    await until_sampled(engine, 4)
    await engine.pause()
    await engine.update_weights(model.new.state_dict().items(), version=1)
    await engine.resume()
    found |= await running

    await engine.sleep()
    await engine.wake()
    again = make_request("again", 5, n=1, seed=4, max_tokens=5)
    found |= await collect(engine, again)

    held = make_request("held", 6, seed=5, max_tokens=200, temperature=0)
    running = asyncio.create_task(collect(engine, held))
    await until_sampled(engine, 4)
    await engine.pause()
    await engine.abort()
    cut |= await running
    # The server is notified in the background.
    await asyncio.sleep(0.2)
    await engine.resume()

    guarded = make_request("guarded", 8, seed=6, max_tokens=200, temperature=0)
    detection = RepetitionDetection(max_pattern_size=8, min_count=2)
    guarded = replace(guarded, sampling=replace(guarded.sampling, repetition_detection=detection))
    found |= await collect(engine, guarded)
    await engine.close()
    return Scenario([plain, greedy, long], [again, guarded], crossing, cut, found)


class _Server(ABC):
    """A web server in this event loop."""

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[str]:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await runner.cleanup()

    @abstractmethod
    async def handle(self, request: web.Request) -> web.StreamResponse: ...


class Recorder(_Server):
    """Stands between an engine and a server, and writes down what they say."""

    def __init__(self, url: str) -> None:
        self.exchanges: list[Exchange] = []
        self._url = url
        self._names: dict[str, str] = {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        exchange = Exchange(request.method, request.path, without_names(body, self._names))
        self.exchanges.append(exchange)
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, self._url + request.path, json=body) as answer,
        ):
            exchange.status = answer.status
            if answer.content_type != "text/event-stream":
                text = await answer.text()
                exchange.answer = (
                    json.loads(text) if answer.content_type == "application/json" else text
                )
                if request.path == "/server_info":
                    exchange.answer = {name: exchange.answer[name] for name in _KEPT_OF_SERVER_INFO}
                    exchange.answer["model_path"] = "the model"
                return web.Response(
                    text=text, status=answer.status, content_type=answer.content_type
                )
            response = web.StreamResponse()
            await response.prepare(request)
            buffer = b""
            # Whoever has heard enough hangs up.
            with suppress(ConnectionError):
                async for data in answer.content.iter_any():
                    *events, buffer = (buffer + data).split(b"\n\n")
                    for event in map(_event, events):
                        # The end of a stream belongs to what comes before it, even if it comes later.
                        num_calls = (
                            exchange.events[-1][0] if event == "[DONE]" else len(self.exchanges)
                        )
                        exchange.events.append((num_calls, event))
                    await response.write(data)
            return response

    def write(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(asdict(exchange)) + "\n" for exchange in self.exchanges))


class Replay(_Server):
    """Answers as the server did, if it is asked what the server was asked."""

    def __init__(self, exchanges: list[Exchange], *, model_path: Path) -> None:
        self.left = list(exchanges)
        self.unexpected: list[Exchange] = []
        self._model_path = str(model_path)
        self._names: dict[str, str] = {}
        self._num_calls = 0
        self._called = asyncio.Condition()

    @classmethod
    def of(cls, path: Path, *, model_path: Path) -> Self:
        return cls(
            [Exchange(**json.loads(line)) for line in path.read_text().splitlines()],
            model_path=model_path,
        )

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        asked = Exchange(request.method, request.path, without_names(body, self._names))
        async with self._called:
            self._num_calls += 1
            self._called.notify_all()
        known = [
            e
            for e in self.left
            if (e.method, e.path, e.body) == (asked.method, asked.path, asked.body)
        ]
        if not known:
            self.unexpected.append(asked)
            return web.Response(status=500, text=f"not expected: {asked}")
        exchange = known[0]
        self.left.remove(exchange)
        if exchange.events:
            return await self._stream(request, exchange)
        if isinstance(exchange.answer, str):
            return web.Response(status=exchange.status, text=exchange.answer)
        if request.path == "/server_info":
            exchange.answer["model_path"] = self._model_path
        return web.json_response(exchange.answer, status=exchange.status)

    async def _stream(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with suppress(ConnectionError):
            for num_calls, event in exchange.events:
                async with self._called:
                    await self._called.wait_for(partial(self._has_got, num_calls))
                text = event if event == "[DONE]" else json.dumps(event)
                await response.write(f"data: {text}\n\n".encode())
        return response

    def _has_got(self, num_calls: int) -> bool:
        return self._num_calls >= num_calls


def without_names(body: Any, names: dict[str, str]) -> Any:
    """A call's body without what is another every time: ids become their sample's seed."""
    if not isinstance(body, dict):
        return body
    known: dict[str, Any] = {str(key): value for key, value in body.items()}  # pyright: ignore[reportUnknownVariableType]
    if "sampling_params" in known:
        names[known["rid"]] = f"id of seed {known['sampling_params']['sampling_seed']}"
        known["extra_key"] = known["extra_key"].rpartition("-")[2]
    if "rid" in known:
        known["rid"] = names[known["rid"]]
    if "model_path" in known:
        known["model_path"] = "the new weights"
    return known


def _event(data: bytes) -> Any:
    text = data.decode().removeprefix("data: ")
    if text == "[DONE]":
        return text
    event = json.loads(text)
    event["meta_info"] = {
        name: event["meta_info"][name] for name in _KEPT_OF_META_INFO if name in event["meta_info"]
    }
    return event
