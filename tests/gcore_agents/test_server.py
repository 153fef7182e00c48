"""The endpoint over HTTP: keys, failures, retries, streams, and a session's own routes."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from scripted import ScriptedSampler, call_tool, make_session

from gcore_agents import CallError, Session, SessionReward, choose_trained
from gcore_agents.server import AgentServer

QUESTION = [{"role": "user", "content": "2 + 2 ="}]
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "google": "/v1beta/models/any/thing:generateContent",
    "completions": "/v1/completions",
}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": QUESTION},
    "responses": {"input": QUESTION},
    "anthropic": {"messages": QUESTION, "max_tokens": 100},
    "google": {"contents": [{"role": "user", "parts": [{"text": "2 + 2 ="}]}]},
    "completions": {"prompt": "2 + 2 =", "max_tokens": 100},
}
APIS = list(PATHS)
CHATS = [name for name in APIS if name != "completions"]


class Client:
    """Calls a server with the key of a session."""

    def __init__(self, server: AgentServer, session: Session, http: aiohttp.ClientSession) -> None:
        self.server = server
        self.session = session
        self._http = http
        self.key = session.key
        server.open(session)

    async def call(
        self, path: str, body: Any = None, *, method: str = "POST", **headers: str
    ) -> tuple[int, Any, Any]:
        """Return status, body and headers of a reply; the body is text if it is not JSON."""
        headers = {"Authorization": f"Bearer {self.key}", **headers}
        data = body if isinstance(body, bytes | None) else json.dumps(body)
        url = self.server.url + path
        async with self._http.request(method, url, data=data, headers=headers) as response:
            text = await response.text()
            if text and response.content_type == "application/json":
                return response.status, json.loads(text), response.headers
            return response.status, text, response.headers

    async def ask(self, api: str = "chat", **fields: Any) -> tuple[int, Any]:
        """Return status and body of the reply to a question."""
        status, reply, _ = await self.call(PATHS[api], {**BODIES[api], **fields})
        return status, reply

    async def stream(self, api: str) -> tuple[int, str]:
        """Return status and text of a stream."""
        path = PATHS[api]
        if api == "google":
            path = path.replace(":generate", ":streamGenerate") + "?alt=sse"
            status, text, _ = await self.call(path, BODIES[api])
        else:
            status, text, _ = await self.call(path, {**BODIES[api], "stream": True})
        return status, text


Connect = Callable[..., Awaitable[Client]]
OPTIONS = ("keep_alive_s", "max_body_bytes", "advertise_host")


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    servers: list[AgentServer] = []

    async with aiohttp.ClientSession() as http:

        async def start(*texts: str | Exception, delay_s: float = 0.0, **fields: Any) -> Client:
            options = {name: fields.pop(name) for name in list(fields) if name in OPTIONS}
            server = AgentServer(**options)
            await server.start()
            servers.append(server)
            return Client(server, make_session(*texts, delay_s=delay_s, **fields), http)

        yield start
        for server in servers:
            await server.close()


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("where", ["header", "path", "keyless path"])
async def test_a_call_says_which_agent_makes_it(connect: Connect, api: str, where: str) -> None:
    client = await connect("4")
    path = PATHS[api]
    headers: dict[str, str] = {}
    if where == "header":
        headers = {"x-gcore-agent": "planner"}
    elif where == "path":
        path = f"/a/planner{path}"
    else:
        url = client.server.session_url(client.session, agent="planner")
        path = url.removeprefix(client.server.url).removesuffix("/v1") + path
        client.key = ""
    status, reply, _ = await client.call(path, BODIES[api], **headers)
    assert (status, read_text(api, reply)) == (200, "4")
    client.key = client.session.key
    assert await list_agents(client) == ["planner"]


async def list_agents(client: Client) -> list[str]:
    """Return the agent of each turn."""
    _, graph, _ = await client.call("/v1/session/graph", method="GET")
    return [node["agent"] for node in graph["nodes"] if node["response_id"]]


@pytest.mark.parametrize("name", ["two words", "a/b", "n" * 65, "caf\u00e9"])
async def test_a_name_of_an_agent_is_short_and_simple(connect: Connect, name: str) -> None:
    client = await connect("4")
    status, reply, _ = await client.call(PATHS["chat"], BODIES["chat"], **{"x-gcore-agent": name})
    assert status == 400
    assert "expected a name of up to 64 letters, digits, '_', '-' and '.'" in str(reply)
    assert await list_agents(client) == []


async def test_equal_calls_of_two_agents_at_once_are_two_turns(connect: Connect) -> None:
    client = await connect("one", "two", delay_s=0.1)
    names = ["first", "second"]
    calls = [
        client.call(PATHS["chat"], BODIES["chat"], **{"x-gcore-agent": name}) for name in names
    ]
    await asyncio.gather(*calls)
    assert sorted(await list_agents(client)) == names


async def test_agents_have_rewards_of_their_own(connect: Connect) -> None:
    client = await connect("4")
    replies: dict[str, Any] = {}
    for name in ("planner", "helper"):
        _, replies[name], _ = await client.call(
            PATHS["chat"], BODIES["chat"], **{"x-gcore-agent": name}
        )
    rewards = [
        {"agent": "planner", "value": 1.0},
        {"agent": "planner", "value": 0.5, "name": "style"},
        {"agent": "helper", "value": -1.0, "response_id": replies["helper"]["id"]},
    ]
    for reward in rewards:
        status, _, _ = await client.call("/v1/session/reward", reward)
        assert status == 200
    await client.call("/a/helper/v1/session/reward", {"value": -2.0})
    session = client.session
    assert [session.agent_score(name) for name in ("planner", "helper")] == [1.5, -3.0]
    assert session.score == -1.5
    refused = [
        ({"agent": "judge", "value": 1.0}, "agent is 'judge'; expected one of: helper, planner"),
        ({"agent": 1, "value": 1.0}, "agent is 1; expected text"),
        (
            {"agent": "planner", "value": 1.0, "response_id": replies["helper"]["id"]},
            "agent is 'planner'; expected one of: helper",
        ),
    ]
    for reward, expected in refused:
        status, reply, _ = await client.call("/v1/session/reward", reward)
        assert status == 400
        assert expected in str(reply), reply
    assert len(session.rewards) == 4


async def test_a_reward_of_an_agent_before_any_has_called(connect: Connect) -> None:
    client = await connect("4")
    status, reply, _ = await client.call("/v1/session/reward", {"agent": "a", "value": 1.0})
    assert status == 400
    assert "expected one of: none, because no call named its agent" in str(reply)


def read_text(api: str, reply: Any) -> str:
    """Return the text of a reply."""
    match api:
        case "chat":
            return reply["choices"][0]["message"]["content"]
        case "responses":
            return reply["output"][0]["content"][0]["text"]
        case "anthropic":
            return reply["content"][0]["text"]
        case "google":
            return reply["candidates"][0]["content"]["parts"][0]["text"]
        case _:
            return reply["choices"][0]["text"]


def read_finish(api: str, reply: Any) -> str:
    match api:
        case "responses":
            return reply["status"]
        case "anthropic":
            return reply["stop_reason"]
        case "google":
            return reply["candidates"][0]["finishReason"]
        case _:
            return reply["choices"][0]["finish_reason"]


def read_stream(api: str, text: str) -> str:
    """Return the text of a stream's deltas."""
    pieces: list[str] = []
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        match api:
            case "chat":
                pieces.append(event["choices"][0]["delta"].get("content") or "")
            case "completions":
                pieces.append(event["choices"][0]["text"])
            case "responses" if event["type"] == "response.output_text.delta":
                pieces.append(event["delta"])
            case "anthropic" if event["type"] == "content_block_delta":
                pieces.append(event["delta"]["text"])
            case "google":
                pieces.append(event["candidates"][0]["content"]["parts"][0]["text"])
            case _:
                pass
    return "".join(pieces)


def list_turns(session: Session) -> list[str]:
    return [str(node.messages[0]["content"]) for node in session.graph.turns()]


def sampler_of(client: Client) -> ScriptedSampler:
    sampler = client.session.sampler
    assert isinstance(sampler, ScriptedSampler)
    return sampler


@pytest.mark.parametrize("api", APIS)
async def test_every_api_answers_and_streams(connect: Connect, api: str) -> None:
    client = await connect("4 is it.", "No, 5.")
    status, reply = await client.ask(api)
    assert (status, read_text(api, reply)) == (200, "4 is it.")
    assert read_finish(api, reply) in ("stop", "completed", "end_turn", "STOP")
    status, text = await client.stream(api)
    assert (status, read_stream(api, text)) == (200, "No, 5.")
    assert list_turns(client.session) == ["4 is it.", "No, 5."]
    assert all(node.is_delivered for node in client.session.graph.turns())


@pytest.mark.parametrize("header", ["Authorization", "x-api-key", "x-goog-api-key", "?key", "path"])
async def test_a_key_may_be_in_any_place(connect: Connect, header: str) -> None:
    client = await connect()
    key, client.key = client.key, "none"
    path, body = PATHS["chat"], BODIES["chat"]
    match header:
        case "path":
            url = client.server.session_url(client.session)
            path = url.removeprefix(client.server.url) + "/chat/completions"
            status, _, _ = await client.call(path, body)
        case "?key":
            status, _, _ = await client.call(f"{path}?key={key}", body)
        case "Authorization":
            status, _, _ = await client.call(path, body, Authorization=f"Bearer {key}")
        case _:
            status, _, _ = await client.call(path, body, **{header: key})
    assert status == 200


@pytest.mark.parametrize("api", APIS)
async def test_a_base_url_may_have_a_version_more(connect: Connect, api: str) -> None:
    """Anthropic's and Google's clients add one, and may be given OpenAI's base URL."""
    client = await connect("4")
    status, reply, _ = await client.call("/v1" + PATHS[api], BODIES[api])
    assert (status, read_text(api, reply)) == (200, "4")


async def test_a_key_may_lack_its_scheme(connect: Connect) -> None:
    client = await connect()
    for header in (client.session.key, f"bearer  {client.session.key}"):
        status, _, _ = await client.call(PATHS["chat"], BODIES["chat"], Authorization=header)
        assert status == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/embeddings"), ("GET", PATHS["chat"]), ("POST", f"/{PATHS['chat']}")],
)
async def test_other_paths_are_refused_in_json(connect: Connect, method: str, path: str) -> None:
    """SDKs show the message of JSON alone."""
    client = await connect()
    status, reply, _ = await client.call(path, method=method)
    assert status == 404
    assert reply["error"]["message"].startswith(f"{method} {path} is not served; expected")


async def test_a_body_that_is_not_compressed_as_it_says(connect: Connect) -> None:
    client = await connect()
    headers = {"Content-Encoding": "gzip"}
    status, reply, _ = await client.call(PATHS["chat"], b"no such thing", **headers)
    assert status == 400
    assert "the body cannot be read" in reply["error"]["message"]


@pytest.mark.parametrize("api", APIS)
async def test_unknown_keys_and_closed_sessions(connect: Connect, api: str) -> None:
    client = await connect()
    client.key = "unknown"
    status, reply = await client.ask(api)
    assert status == 401
    assert "error" in reply
    client.key = client.session.key
    client.session.close()
    status, reply = await client.ask(api)
    assert (status, "closed" in json.dumps(reply)) == (409, True)
    client.server.release(client.session)
    assert (await client.ask(api))[0] == 409
    assert (await client.stream(api))[0] == 409


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    "budget",
    [{"max_calls": 1}, {"max_tokens": 3}, {"max_context": 5}, {"timeout_s": 1e-9}],
    ids=str,
)
async def test_a_session_without_budget_ends_by_a_text(
    connect: Connect, api: str, budget: dict[str, Any]
) -> None:
    client = await connect(**budget)
    reply: Any = None
    for _ in range(2):
        status, reply = await client.ask(api)
        assert status == 200
    assert "budget" in read_text(api, reply)
    assert read_finish(api, reply) in ("stop", "completed", "end_turn", "STOP")
    status, text = await client.stream(api)
    assert (status, "budget" in read_stream(api, text)) == (200, True)
    assert client.session.end in ("max_turns", "length", "timeout")
    assert not [text for text in list_turns(client.session) if "budget" in text]


async def test_huge_limits_are_clamped(connect: Connect) -> None:
    client = await connect(max_tokens_per_turn=50)
    assert (await client.ask(max_tokens=64_000))[0] == 200
    assert sampler_of(client).max_tokens == [50]


async def test_bodies_that_cannot_be_read(connect: Connect) -> None:
    client = await connect(max_body_bytes=1000)
    path = PATHS["chat"]
    for body, expected in [
        (b"{", 400),
        (b"\xff\xfe", 400),
        (b"[" * 900, 400),
        (b"4", 400),
        (b'{"messages": NaN}', 400),
        (b" " * 2000, 413),
    ]:
        status, reply, _ = await client.call(path, body)
        assert (status, reply["error"]["param"]) in ((expected, "body"), (expected, None))
    status, reply, _ = await client.call(PATHS["anthropic"], b" " * 2000)
    assert (status, reply["error"]["type"]) == (413, "request_too_large")
    status, reply = await client.ask(n=0)
    assert (status, reply["error"]["param"]) == (400, "n")
    assert not client.session.graph.nodes


async def test_several_turns_of_one_call_are_siblings(connect: Connect) -> None:
    client = await connect("A.", "B.", "C.")
    status, reply, headers = await client.call(PATHS["chat"], {**BODIES["chat"], "n": 3})
    assert status == 200
    assert sorted(c["message"]["content"] for c in reply["choices"]) == ["A.", "B.", "C."]
    assert len(headers["x-gcore-response-id"].split(",")) == 3
    (question,) = client.session.graph.root.children
    assert len(question.children) == 3
    assert len(set(sampler_of(client).seeds)) == 3


async def test_a_turn_is_continued_with_its_own_tokens(connect: Connect) -> None:
    client = await connect(f"So.{call_tool('add')}", "4.", "Bye.")
    tool = {"type": "function", "function": {"name": "add"}}
    _, reply = await client.ask(tools=[tool])
    turn = reply["choices"][0]["message"]
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    result = {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "content": "4"}
    _, reply = await client.ask(tools=[tool], messages=[*QUESTION, turn, result])
    assert read_text("chat", reply) == "4."
    assert not client.session.graph.findings
    turns = list(client.session.graph.turns())
    assert turns[1].path()[1] is turns[0]
    assert sampler_of(client).prompts[1] == turns[1].path_tokens()[: -len(turns[1].token_ids)]


async def test_tokens_are_continued_where_they_are(connect: Connect) -> None:
    client = await connect("4.", "5.")
    body = {**BODIES["completions"], "return_token_ids": True, "logprobs": 1}
    _, reply, _ = await client.call(PATHS["completions"], body)
    (choice,) = reply["choices"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 3
    prompt = [*choice["prompt_token_ids"], *choice["token_ids"], 5, 6]
    await client.ask("completions", prompt=prompt)
    first, second = client.session.graph.turns()
    assert second.path()[1] is first
    assert sampler_of(client).prompts[1] == prompt


async def test_stop_strings_end_a_turn_and_are_not_sent(connect: Connect) -> None:
    client = await connect("One. Observation: two", "Three.")
    _, reply = await client.ask(stop=["Observation:"])
    assert read_text("chat", reply) == "One. "
    turn = reply["choices"][0]["message"]
    for content in (turn["content"], f"{turn['content']}Observation:"):
        sent = {**turn, "content": content}
        await client.ask(messages=[*QUESTION, sent, {"role": "user", "content": "More."}])
    first, *further = client.session.graph.turns()
    assert [turn.path()[1] for turn in further] == [first, first]
    assert not client.session.graph.findings
    # What a reward reads has all that was sampled.
    assert client.session.turn_text(first.response_id) == "One. Observation:"
    client = await connect("One. Observation: two")
    _, reply = await client.ask("anthropic", stop_sequences=["Observation:"])
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "Observation:")


async def test_log_probs_are_of_the_sampled_tokens(connect: Connect) -> None:
    client = await connect("4.")
    _, reply = await client.ask(logprobs=True)
    entries = reply["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["4", ".", "<|end|>"]
    assert [entry["logprob"] for entry in entries] == [-0.5, -1.5, -2.5]


async def test_two_calls_at_once(connect: Connect) -> None:
    client = await connect("A.", "B.", delay_s=0.05)
    other = [{"role": "user", "content": "3 + 3 ="}]
    replies = await asyncio.gather(client.ask(), client.ask(messages=other))
    assert sorted(read_text("chat", reply) for _, reply in replies) == ["A.", "B."]
    assert len(client.session.graph.root.children) == 2


async def test_the_same_call_at_once_is_sampled_again(connect: Connect) -> None:
    """Agents ask for several answers at once, to choose one."""
    client = await connect("A.", "B.", "C.", delay_s=0.05)
    calls = [client.ask() for _ in range(3)]
    ids = {reply["id"] for _, reply in await asyncio.gather(*calls)}
    assert len(ids) == 3
    assert sorted(list_turns(client.session)) == ["A.", "B.", "C."]
    assert len(choose_trained(client.session)) == 3


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_retry_in_flight_of_a_client_that_has_gone_gets_the_same_reply(
    connect: Connect, is_stream: bool
) -> None:
    client = await connect("A.", "B.", delay_s=0.5)
    call = client.stream("chat") if is_stream else client.ask()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(call, 0.1)
    await asyncio.sleep(0.1)
    assert (await client.ask(stream=is_stream))[0] == 200
    assert list_turns(client.session) == ["A."]


@pytest.mark.parametrize(
    "headers", [{"x-stainless-retry-count": "1"}, {"Idempotency-Key": "k"}], ids=str
)
async def test_a_marked_retry_gets_the_same_reply(
    connect: Connect, headers: dict[str, str]
) -> None:
    client = await connect("A.", "B.")
    path, body = PATHS["chat"], BODIES["chat"]
    first_headers = headers if "Idempotency-Key" in headers else {"x-stainless-retry-count": "0"}
    _, first, _ = await client.call(path, body, **first_headers)
    _, second, _ = await client.call(path, body, **headers)
    assert first["id"] == second["id"]
    assert list_turns(client.session) == ["A."]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_turn_that_did_not_arrive_waits_for_its_retry(
    connect: Connect, is_stream: bool
) -> None:
    client = await connect("A.", "B.", delay_s=0.2, keep_alive_s=0.1)
    call = client.stream("chat") if is_stream else client.ask()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(call, 0.05)
    await asyncio.sleep(0.5)
    (turn,) = client.session.graph.turns()
    assert not turn.is_delivered
    _, reply = await client.ask(stream=is_stream)
    assert turn.response_id in json.dumps(reply)
    assert turn.is_delivered
    assert list_turns(client.session) == ["A."]


@pytest.mark.parametrize("api", APIS)
async def test_slow_replies_keep_the_stream_alive(connect: Connect, api: str) -> None:
    client = await connect("Late.", delay_s=0.25, keep_alive_s=0.05)
    status, text = await client.stream(api)
    assert status == 200
    sign = '{"candidates": []}' if api == "google" else ": keep-alive"
    assert text.count(sign) >= 3
    assert read_stream(api, text.replace(f"data: {sign}", "")) == "Late."


@pytest.mark.parametrize("api", APIS)
async def test_an_error_in_a_stream_is_an_event(
    connect: Connect, api: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = await connect(RuntimeError("lost"), delay_s=0.15, keep_alive_s=0.1)
    status, text = await client.stream(api)
    assert status == 200
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    last_event = json.loads(lines[-1].removeprefix("data: "))
    assert "RuntimeError" in last_event["error"]["message"]
    assert client.key not in caplog.text


@pytest.mark.parametrize("api", APIS)
async def test_an_error_before_the_headers_has_a_status(connect: Connect, api: str) -> None:
    client = await connect(RuntimeError("lost"), "Found.")
    for ask in (client.ask, client.stream):
        status, reply = await ask(api)
        if status == 500:
            assert "RuntimeError" in str(reply)
            continue
        assert "Found." in read_stream(api, reply)
    assert list_turns(client.session) == ["Found."]


async def test_messages_that_the_template_refuses(connect: Connect) -> None:
    client = await connect()
    status, reply = await client.ask(messages=[{"role": "assistant", "content": "Hi."}])
    assert (status, reply["error"]["param"]) == (400, "messages")
    assert (await client.ask())[0] == 200


async def test_counts_of_tokens_are_exact_and_not_recorded(connect: Connect) -> None:
    client = await connect("4.")
    _, count, _ = await client.call("/v1/messages/count_tokens", {"messages": QUESTION})
    assert not client.session.graph.nodes
    _, reply = await client.ask("anthropic")
    assert count == {"input_tokens": reply["usage"]["input_tokens"]}
    path = PATHS["google"].replace("generateContent", "countTokens")
    _, total, _ = await client.call(path, BODIES["google"])
    assert total == {"totalTokens": count["input_tokens"]}
    _, counts, _ = await client.call("/v1/responses/input_tokens", BODIES["responses"])
    assert counts == count


async def test_texts_become_tokens_and_text_again(connect: Connect) -> None:
    client = await connect()
    for prefix in ("", f"/s/{client.key}"):
        _, reply, _ = await client.call(f"{prefix}/tokenize", {"messages": QUESTION})
        assert reply["count"] == len(reply["tokens"])
        _, text, _ = await client.call("/detokenize", {"tokens": reply["tokens"]})
        assert text["prompt"].endswith("<|start|>assistant\n")
    _, reply, _ = await client.call("/tokenize", {"prompt": "2 + 2"})
    assert reply["count"] == 5
    status, reply, _ = await client.call("/detokenize", {"tokens": [-1]})
    assert (status, reply["error"]["param"]) == (400, "tokens")


async def test_models_and_health(connect: Connect) -> None:
    client = await connect()
    for method, path in [("HEAD", "/"), ("GET", "/"), ("GET", "/health")]:
        assert (await client.call(path, method=method))[0] == 200
    _, reply, _ = await client.call("/v1/models", method="GET")
    assert [model["id"] for model in reply["data"]] == ["policy"]
    _, reply, _ = await client.call("/v1/models/gpt", method="GET")
    assert reply["id"] == "gpt"
    client.key = "unknown"
    assert (await client.call("/v1/models", method="GET"))[0] == 401


async def test_responses_are_found_again(connect: Connect) -> None:
    client = await connect("4.", "5.")
    _, first = await client.ask("responses")
    _, reply, _ = await client.call(f"/v1/responses/{first['id']}", method="GET")
    assert reply == first
    _, second = await client.ask("responses", input="More?", previous_response_id=first["id"])
    assert read_text("responses", second) == "5."
    one, two = client.session.graph.turns()
    assert two.path()[1] is one
    assert (await client.call("/v1/responses/none", method="GET"))[0] == 404


async def test_rewards_and_the_end_of_a_session(connect: Connect) -> None:
    client = await connect("4.")
    _, reply, headers = await client.call(PATHS["chat"], BODIES["chat"])
    response_id = headers["x-gcore-response-id"]
    assert reply["id"] == response_id
    body: dict[str, Any] = {"value": 1.5, "response_id": response_id, "name": "style"}
    assert (await client.call("/session/reward", body))[:2] == (200, {"score": 1.5})
    assert client.session.rewards == [SessionReward(**body)]
    for wrong, field, status in [
        ({"value": "high"}, "value", 400),
        ({"value": 10**400}, "value", 400),
        ({"value": 1, "response_id": "none"}, "response_id", 404),
        ({}, "value", 400),
    ]:
        answer = await client.call("/session/reward", wrong)
        assert (answer[0], answer[1]["error"]["param"]) == (status, field)
    _, state, _ = await client.call("/v1/session", method="GET")
    assert (state["state"], state["calls"], state["tokens"]) == ("open", 1, 3)
    assert (await client.call("/session/close", {"status": "won"}))[0] == 400
    _, state, _ = await client.call("/session/close", {"status": "failed"})
    assert (state["state"], state["status"]) == ("closed", "failed")
    _, state, _ = await client.call("/session", method="GET")
    assert state["state"] == "closed"
    assert (await client.ask())[0] == 409


async def test_closing_ends_calls_in_flight(connect: Connect) -> None:
    client = await connect(delay_s=5.0)
    call = asyncio.create_task(client.ask())
    await asyncio.sleep(0.05)
    client.session.close("truncated")
    assert (await call)[0] == 409
    with pytest.raises(CallError):
        client.session.add_reward(SessionReward(value=float("nan")))


async def test_the_graph_over_http(connect: Connect) -> None:
    client = await connect("4.")
    await client.ask(temperature=0.1)
    _, graph, _ = await client.call("/session/graph", method="GET")
    assert [node["parent"] for node in graph["nodes"]] == [-1, 0]
    assert "token_ids" not in graph["nodes"][0]
    _, graph, _ = await client.call("/session/graph?tokens=1", method="GET")
    assert graph["nodes"][1]["log_probs"] == [-0.5, -1.5, -2.5]
    _, state, _ = await client.call("/session", method="GET")
    assert state["unused"] == {"temperature": 0.1}


async def test_keys_are_not_logged(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client = await connect(RuntimeError("lost"), advertise_host="localhost")
    assert client.server.url.startswith("http://localhost:")
    status, _, _ = await client.call(f"/s/{client.key}{PATHS['chat']}", BODIES["chat"])
    assert status == 500
    assert "a call failed" in caplog.text
    assert client.key not in caplog.text
    assert client.key not in repr(client.session)
