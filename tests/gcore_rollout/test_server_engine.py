"""What an engine makes of a server that refuses, hangs, breaks off or dies; the server is a small one made here."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from engine_oracles import (
    EOS_TOKEN_IDS,
    MAX_LENGTH,
    TinyModel,
    collect,
    first_then_abandon,
    make_request,
    until_idle,
)
from server_processes import free_port

from gcore_rollout import EngineDiedError, EngineModelError, RolloutError
from gcore_rollout.engines.servers.vllm import VLLMServerEngine
from gcore_rollout.errors import ServerRequestError

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SmallServer:
    """Speaks as much of vLLM's language as the engine needs; sampled is always token 7, with log-prob -1.

    ``answers`` holds what a path does instead.
    """

    def __init__(self, model: TinyModel) -> None:
        self.config: dict[str, Any] = {
            "model_config": {
                "model": str(model.path),
                "max_model_len": MAX_LENGTH,
                "logprobs_mode": "processed_logprobs",
            },
            "scheduler_config": {"max_num_seqs": 4},
            "device_config": {"device": "cpu"},
        }
        self.answers: dict[str, Answer] = {}
        self.calls: list[tuple[str, Any]] = []
        self.headers: list[str | None] = []
        self.is_paused = False
        self.version = "default"
        self.num_streams = self.most_streams = 0
        self.aborted: set[str] = set()
        self.token_interval_s = 0.001

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body: Any = await request.json() if request.can_read_body else None
        self.calls.append((request.path, body))
        self.headers.append(request.headers.get("Authorization"))
        if answer := self.answers.get(request.path):
            return await answer(request)
        match request.path:
            case "/server_info":
                return web.json_response({"vllm_config": self.config})
            case "/openapi.json":
                return web.json_response({"paths": {"/inference/v1/generate": {}}})
            case "/is_sleeping":
                return web.json_response({"is_sleeping": False})
            case "/pause" | "/resume":
                self.is_paused = request.path == "/pause"
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/abort_requests":
                self.aborted.update(body["request_ids"])
            case "/inference/v1/generate":
                return await self.generate(request, body)
            case "/collective_rpc" | "/wake_up" | "/sleep":
                pass
            case _:
                raise web.HTTPNotFound
        return web.json_response({})

    async def generate(
        self, request: web.Request, body: Any, *, num_tokens: int | None = None
    ) -> web.StreamResponse:
        """Send tokens: all that are asked for, or ``num_tokens`` and no end."""
        self.num_streams += 1
        self.most_streams = max(self.most_streams, self.num_streams)
        response = web.StreamResponse()
        await response.prepare(request)
        max_tokens = body["sampling_params"]["max_tokens"]
        try:
            for made in range(1, (num_tokens or max_tokens) + 1):
                await asyncio.sleep(self.token_interval_s)
                while self.is_paused:
                    await asyncio.sleep(0.01)
                is_aborted = f"generate-tokens-{body['request_id']}" in self.aborted
                reason = "abort" if is_aborted else "length" if made == max_tokens else None
                await response.write(
                    self.event([] if is_aborted else [7], reason, made - is_aborted)
                )
                if reason:
                    break
        finally:
            self.num_streams -= 1
        return response

    def event(self, tokens: list[int], reason: str | None, num_tokens: int) -> bytes:
        choice = {
            "token_ids": tokens,
            "logprobs": {"content": [{"logprob": -1.0} for _ in tokens]},
            "finish_reason": reason,
            "weight_versions": [{"version": self.version, "start": 0, "end": num_tokens}]
            if reason
            else None,
        }
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls]

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[str]:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port := free_port())
        await site.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await runner.cleanup()


@pytest.fixture
async def server(tied: TinyModel) -> SmallServer:
    return SmallServer(tied)


@pytest.fixture
async def url(server: SmallServer) -> AsyncIterator[str]:
    async with server.running() as url:
        yield url


async def connect(url: str, **options: Any) -> VLLMServerEngine:
    return await asyncio.to_thread(lambda: VLLMServerEngine.connect(url, **options))


def says(status: int, text: str = "no such luck") -> Answer:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, text=text)

    return answer


async def test_a_server_that_is_not_there() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(
        EngineDiedError, match=f"the server at {url} was lost: Cannot connect to host"
    ):
        await connect(url)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"url": "localhost:8000"},
            "url is 'localhost:8000'; expected http://HOST:PORT or https://HOST:PORT",
        ),
        ({"timeout_s": 0}, "timeout_s is 0; expected more than 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0; expected at least 1"),
        (
            {"weights_dir": "nowhere"},
            "weights_dir is 'nowhere'; expected an existing folder that the server sees",
        ),
    ],
)
async def test_bad_options_are_refused(url: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        await connect(**({"url": url} | options))


async def test_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(RolloutError, match=r"pip install 'gcore-rollout\[http\]'"):
        await connect("http://127.0.0.1:1")


async def test_a_server_without_what_is_needed(server: SmallServer, url: str) -> None:
    server.answers["/server_info"] = says(404)
    with pytest.raises(
        RolloutError, match=f"{url} does not report its configuration: .* VLLM_SERVER_DEV_MODE=1"
    ):
        await connect(url)
    del server.answers["/server_info"]
    server.config["model_config"]["logprobs_mode"] = "raw_logprobs"
    with pytest.raises(
        RolloutError, match="'raw_logprobs': start it with --logprobs-mode processed_logprobs"
    ):
        await connect(url)
    server.config["model_config"]["logprobs_mode"] = "processed_logprobs"
    server.answers["/openapi.json"] = says(200, '{"paths": {}}')
    with pytest.raises(
        RolloutError, match="has no /inference/v1/generate: start it with --enable-scale-out"
    ):
        await connect(url)
    del server.answers["/openapi.json"]
    server.config["model_config"]["model"] = "owner/name"
    with pytest.raises(
        EngineModelError,
        match="owner/name, which is no model's folder on this machine: set mode",
    ):
        await connect(url)


async def test_what_is_left_paused_is_taken_over(server: SmallServer, url: str) -> None:
    server.answers["/is_sleeping"] = says(200, '{"is_sleeping": true}')
    await connect(url)
    assert "/wake_up" in server.paths()
    assert server.version == "0"


async def test_what_is_sent(server: SmallServer, url: str) -> None:
    engine = await connect(url, api_key="secret", eos_token_ids=[3])
    (completion,) = (
        await collect(engine, make_request("r", 5, max_tokens=6, temperature=0.5, seed=9))
    ).values()
    assert completion.token_ids.tolist() == [7] * 6
    assert completion.log_probs.tolist() == [-1.0] * 6
    body = server.calls[-1][1]
    assert len(body["token_ids"]) == 5
    sampling = body["sampling_params"]
    assert (sampling["max_tokens"], sampling["temperature"], sampling["stop_token_ids"]) == (
        6,
        0.5,
        [3],
    )
    assert set(server.headers) == {"Bearer secret"}
    await collect(await connect(url), make_request("r", 5, max_tokens=1))
    other = server.calls[-1][1]
    assert other["sampling_params"]["stop_token_ids"] == EOS_TOKEN_IDS
    # What another client's weights of version 0 left in the cache is not for these.
    assert other["cache_salt"] != body["cache_salt"]


async def test_no_more_connections_than_samples_at_once(server: SmallServer, url: str) -> None:
    engine = await connect(url, max_num_seqs=3)
    assert len(await collect(engine, make_request("r", 5, n=20, max_tokens=5))) == 20
    assert server.most_streams == 3


async def test_a_server_that_fails(server: SmallServer, url: str) -> None:
    """The error names it and what is owed; nothing is sent again; everything afterwards fails alike."""
    engine = await connect(url, max_num_seqs=2)
    done = await collect(engine, make_request("done", 3))
    server.answers["/inference/v1/generate"] = says(500, "out of memory")
    server.calls.clear()
    with pytest.raises(
        EngineDiedError, match=f"{url}/inference/v1/generate: the server says 500: out of mem"
    ) as raised:
        await collect(engine, make_request("r", 3, n=3), make_request("s", 3))
    assert sorted(raised.value.unfinished) == [("r", 0), ("r", 1), ("r", 2), ("s", 0)]
    assert server.paths().count("/inference/v1/generate") <= 2
    assert len(done) == 1
    assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 0)
    with pytest.raises(EngineDiedError, match="the server says 500") as raised:
        await collect(engine, make_request("t", 3))
    assert raised.value.unfinished == (("t", 0),)
    for call in (engine.abort(), engine.pause(), engine.resume(), engine.sleep(), engine.wake()):
        with pytest.raises(EngineDiedError, match="the server says 500"):
            await call
    await engine.close()


async def test_a_stream_that_breaks_off(server: SmallServer, url: str) -> None:
    """What came before is handed over."""
    engine = await connect(url)
    num_calls = 0

    async def third_breaks(request: web.Request) -> web.StreamResponse:
        nonlocal num_calls
        num_calls += 1
        body = await request.json()
        if num_calls < 3:
            return await server.generate(request, body)
        await asyncio.sleep(0.1)
        return await server.generate(request, body, num_tokens=2)

    server.answers["/inference/v1/generate"] = third_breaks
    completions = engine.generate([make_request("r", 3, n=3, max_tokens=8)])
    assert sorted([(await anext(completions)).index for _ in range(2)]) == [0, 1]
    with pytest.raises(
        EngineDiedError, match=f"the server at {url} broke off a stream; unfinished samples: 1"
    ):
        await anext(completions)


async def test_a_refused_sample_ends_its_call_only(server: SmallServer, url: str) -> None:
    engine = await connect(url)
    server.answers["/inference/v1/generate"] = says(400, "too hot")
    with pytest.raises(ServerRequestError, match="the server says 400: too hot") as raised:
        await collect(engine, make_request("r", 3))
    assert raised.value.status == 400
    del server.answers["/inference/v1/generate"]
    assert len(await collect(engine, make_request("r", 3, n=5))) == 5
    await until_idle(engine)


async def test_an_error_in_the_stream(server: SmallServer, url: str) -> None:
    engine = await connect(url)
    server.answers["/inference/v1/generate"] = says(
        200, 'data: {"error": {"code": 500, "message": "lost"}}\n\n'
    )
    with pytest.raises(
        EngineDiedError, match=r"sample 0 of 'r', POST http.*: the server says 500: lost"
    ):
        await collect(engine, make_request("r", 3))


@pytest.mark.slow
async def test_silence(server: SmallServer, url: str) -> None:
    """It ends the engine, unless the server is paused."""
    engine = await connect(url, timeout_s=1.5)
    running = asyncio.create_task(collect(engine, make_request("r", 3, max_tokens=100)))
    while not engine.stats().completion_tokens:
        await asyncio.sleep(0.01)
    await engine.pause()
    await asyncio.sleep(2.5)
    assert not running.done()
    await engine.resume()
    assert len(await running) == 1
    server.token_interval_s = 60.0
    with pytest.raises(
        EngineDiedError, match=f"the server at {url} said nothing for 1.5 s; unfinished samples: 1"
    ):
        await collect(engine, make_request("r", 3))


async def test_an_abort_that_overtakes_its_request(server: SmallServer, url: str) -> None:
    engine = await connect(url)

    async def late(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        await asyncio.sleep(0.1)
        server.aborted.clear()
        return await server.generate(request, body)

    server.answers["/inference/v1/generate"] = late
    server.token_interval_s = 0.02
    running = asyncio.create_task(collect(engine, make_request("r", 3, max_tokens=400)))
    while engine.stats().num_running == 0:
        await asyncio.sleep(0)
    await engine.abort()
    (completion,) = (await running).values()
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) < 400
    assert server.paths().count("/abort_requests") > 1


async def test_an_abort_without_effect_is_not_waited_for_for_ever(
    server: SmallServer, url: str
) -> None:
    engine = await connect(url, timeout_s=1.5)
    server.answers["/abort_requests"] = says(200)
    server.token_interval_s = 0.05
    running = asyncio.create_task(collect(engine, make_request("r", 3, max_tokens=400)))
    while engine.stats().num_running == 0:
        await asyncio.sleep(0)
    with pytest.raises(EngineDiedError, match="does not end aborted samples"):
        await engine.abort()
    with pytest.raises(
        EngineDiedError, match="does not end aborted samples; unfinished samples: 1"
    ):
        await running


async def test_the_server_is_notified_of_abandoned_requests(server: SmallServer, url: str) -> None:
    engine = await connect(url)
    requests = [
        make_request("short", 3, max_tokens=1),
        make_request("long", 3, n=3, max_tokens=400),
    ]
    await first_then_abandon(engine, requests)
    await until_idle(engine)
    async with asyncio.timeout(300):
        while server.num_streams or len(server.aborted) < 3:
            await asyncio.sleep(0.01)


async def test_a_stop_string_ends_a_sample_of_a_server(server: SmallServer, url: str) -> None:
    """Here, with the token that completes it; the server is notified. It has sampled `b` again and again."""
    engine = await connect(url)
    free, guarded = (
        make_request("free", 3, max_tokens=9),
        make_request("guarded", 3, max_tokens=400),
    )
    guarded = replace(guarded, sampling=replace(guarded.sampling, stop=("a", "bbbb")))
    found = await collect(engine, free, guarded)
    stopped = found["guarded", 0]
    assert (stopped.token_ids.tolist(), stopped.finish_reason) == ([7] * 4, "stop")
    assert (stopped.log_probs.tolist(), stopped.weight_versions.tolist()) == ([-1.0] * 4, [0] * 4)
    assert found["free", 0].finish_reason == "length"
    async with asyncio.timeout(300):
        while server.num_streams or not server.aborted:
            await asyncio.sleep(0.01)
    await engine.close()


async def test_an_update_without_a_folder(url: str, tied: TinyModel) -> None:
    engine = await connect(url)
    with pytest.raises(
        RolloutError, match="the engine was made without weights_dir: update_weights needs it"
    ):
        await engine.update_weights(tied.new.state_dict().items(), version=1)


async def test_a_server_that_would_keep_its_old_head(
    server: SmallServer, url: str, tied: TinyModel, tmp_path: Path
) -> None:
    engine = await connect(url, weights_dir=tmp_path)
    server.answers["/collective_rpc"] = says(500, "Method 'check_worker' is not implemented.")
    with pytest.raises(
        RolloutError,
        match=r"load the new weights of its tied head or experts wrongly: .*gcore_rollout\.TiedHeadWorker",
    ):
        await engine.update_weights(tied.new.state_dict().items(), version=1)
    assert (engine.weight_version, server.version, list(tmp_path.iterdir())) == (0, "0", [])
    assert len(await collect(engine, make_request("r", 3))) == 1


async def test_a_head_of_its_own_needs_no_repacking(
    server: SmallServer, url: str, untied: TinyModel, tmp_path: Path
) -> None:
    engine = await connect(url, weights_dir=tmp_path, model_path=untied.path)
    await engine.update_weights(untied.new.state_dict().items(), version=1)
    (body,) = [body for path, body in server.calls if path == "/collective_rpc"]
    (folder,) = tmp_path.iterdir()
    assert body == {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}


async def test_weights_that_cannot_be_loaded(
    server: SmallServer, url: str, untied: TinyModel, tmp_path: Path
) -> None:
    engine = await connect(url, weights_dir=tmp_path, model_path=untied.path)
    server.answers["/collective_rpc"] = says(500, "no such folder")
    with pytest.raises(
        EngineDiedError, match=r"weights-1-.* could not be loaded, does the .*500: no such folder"
    ):
        await engine.update_weights(untied.new.state_dict().items(), version=1)
    assert not list(tmp_path.iterdir())
    with pytest.raises(EngineDiedError, match="could not be loaded"):
        await collect(engine, make_request("r", 3))


async def test_a_cancelled_update_leaves_nothing_half_way(
    server: SmallServer, url: str, untied: TinyModel, tmp_path: Path
) -> None:
    engine = await connect(url, weights_dir=tmp_path, model_path=untied.path)
    loading = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        loading.set()
        await asyncio.sleep(0.2)
        return web.json_response({})

    server.answers["/collective_rpc"] = slow
    running = asyncio.create_task(collect(engine, make_request("r", 3, max_tokens=400)))
    update = asyncio.create_task(engine.update_weights(untied.new.state_dict().items(), version=1))
    await loading.wait()
    assert server.is_paused
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    assert (engine.weight_version, server.version, server.is_paused) == (1, "1", False)
    (completion,) = (await running).values()
    assert len(completion.token_ids) == 400


async def test_one_change_at_a_time(
    server: SmallServer, url: str, untied: TinyModel, tmp_path: Path
) -> None:
    """A pause during an update holds when that is done."""
    engine = await connect(url, weights_dir=tmp_path, model_path=untied.path)
    updates = [engine.update_weights(untied.new.state_dict().items(), version=v) for v in (1, 2)]
    await asyncio.gather(*updates, engine.pause())
    assert server.is_paused
    assert (engine.weight_version, server.version) == (2, "2")
    running = asyncio.create_task(collect(engine, make_request("r", 3, n=2, max_tokens=3)))
    await asyncio.sleep(0.05)
    assert engine.stats().num_waiting == 2
    await engine.resume()
    assert {tuple(c.weight_versions) for c in (await running).values()} == {(2, 2, 2)}


async def test_versions_seen_from_here_fill_in_for_the_server(
    server: SmallServer,
    url: str,
    untied: TinyModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = await connect(url, weights_dir=tmp_path, model_path=untied.path)
    whole_event = server.event

    def event_without_versions(tokens: list[int], reason: str | None, num_tokens: int) -> bytes:
        event = json.loads(whole_event(tokens, reason, num_tokens).removeprefix(b"data: "))
        event["choices"][0]["weight_versions"] = None
        return b"data: " + json.dumps(event).encode() + b"\n\n"

    monkeypatch.setattr(server, "event", event_without_versions)
    running = asyncio.create_task(collect(engine, make_request("r", 3, max_tokens=60)))
    while engine.stats().completion_tokens < 5:
        await asyncio.sleep(0.001)
    await engine.pause()
    num_before = engine.stats().completion_tokens
    await engine.update_weights(untied.new.state_dict().items(), version=4)
    await engine.resume()
    (completion,) = (await running).values()
    np.testing.assert_array_equal(
        completion.weight_versions, [0] * num_before + [4] * (60 - num_before)
    )
