"""The SDKs of OpenAI and Anthropic against the endpoint, as agents use them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from scripted import call_tool, make_session

from gcore_agents import Session
from gcore_agents.server import AgentServer

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
CHAT_TOOL = {"type": "function", "function": FUNCTION}
RESPONSES_TOOL = {"type": "function", "strict": False, **FUNCTION}
ANTHROPIC_TOOL = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
TWO_CALLS = "So." + call_tool("add", '{"a": 1}') + call_tool("add", '{"a": 2}')
QUESTION: dict[str, Any] = {"role": "user", "content": "2 + 2 ="}


@pytest.fixture
async def server() -> AsyncIterator[AgentServer]:
    server = AgentServer(keep_alive_s=0.05)
    await server.start()
    yield server
    await server.close()


@pytest.fixture
async def clients() -> AsyncIterator[list[Any]]:
    """Clients, which are closed after the test."""
    clients: list[Any] = []
    yield clients
    for client in clients:
        await client.close()


@pytest.fixture
def open_openai(server: AgentServer, clients: list[Any]) -> Callable[[Session], Any]:
    def open_client(session: Session) -> Any:
        base_url = server.open(session)
        client = openai.AsyncOpenAI(base_url=base_url, api_key=session.key, max_retries=1)
        clients.append(client)
        return client

    return open_client


@pytest.fixture
def open_anthropic(server: AgentServer, clients: list[Any]) -> Callable[[Session], Any]:
    def open_client(session: Session) -> Any:
        server.open(session)
        client = anthropic.AsyncAnthropic(base_url=server.url, api_key=session.key, max_retries=1)
        clients.append(client)
        return client

    return open_client


def check_one_conversation(session: Session, num_turns: int) -> None:
    """Check that every turn was delivered, and continues the one before."""
    turns = list(session.graph.turns())
    assert len(turns) == num_turns
    assert all(turn.is_delivered for turn in turns)
    assert [node for node in turns[-1].path() if node.is_turn] == turns
    assert not session.graph.findings


@pytest.mark.parametrize("is_stream", [False, True])
async def test_chat_with_parallel_calls(
    open_openai: Callable[[Session], Any], is_stream: bool
) -> None:
    session = make_session(TWO_CALLS, "3 it is.", delay_s=0.1)
    client = open_openai(session)
    messages = [QUESTION]
    for _ in range(2):
        arguments: Any = {"model": "any", "messages": messages, "tools": [CHAT_TOOL]}
        if is_stream:
            async with client.chat.completions.stream(**arguments) as stream:
                async for _ in stream:
                    pass
                reply = await stream.get_final_completion()
        else:
            reply = await client.chat.completions.create(**arguments)
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in message.tool_calls or ():
            result = str(json.loads(call.function.arguments)["a"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert [message["role"] for message in messages].count("tool") == 2
    assert messages[-1]["content"] == "3 it is."
    check_one_conversation(session, 2)


async def test_chat_streams_usage_and_several_turns(open_openai: Callable[[Session], Any]) -> None:
    session = make_session("A.", "B.")
    client = open_openai(session)
    stream = await client.chat.completions.create(
        model="any",
        messages=[QUESTION],
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
    )
    texts = ["", ""]
    usage: Any = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert sorted(texts) == ["A.", "B."]
    assert usage.completion_tokens == 6
    assert usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("results_are", ["chained", "after all calls", "after each call"])
async def test_responses_with_parallel_calls(
    open_openai: Callable[[Session], Any], is_stream: bool, results_are: str
) -> None:
    session = make_session(f"<think>Hm.</think>{TWO_CALLS}", "3 it is.", delay_s=0.1)
    client = open_openai(session)
    items: list[Any] = [QUESTION]
    previous: str | None = None
    response: Any = None
    for _ in range(2):
        arguments: Any = {"model": "any", "input": items, "tools": [RESPONSES_TOOL]}
        arguments["instructions"] = "Be brief."
        if previous is not None:
            arguments["previous_response_id"] = previous
        if is_stream:
            async with client.responses.stream(**arguments) as stream:
                async for _ in stream:
                    pass
                response = await stream.get_final_response()
        else:
            response = await client.responses.create(**arguments)
        kinds = [item.type for item in response.output]
        results: list[Any] = []
        for item in response.output:
            if item.type == "function_call":
                result = str(json.loads(item.arguments)["a"])
                results.append(
                    {"type": "function_call_output", "call_id": item.call_id, "output": result}
                )
        if results_are == "chained":
            previous = response.id
            items = results
        else:
            outputs = [item.model_dump(exclude_none=True) for item in response.output]
            for output in outputs:
                output.pop("parsed_arguments", None)
            items = [*items, *outputs, *results]
            if results_are == "after each call" and results:
                items[-3], items[-2] = items[-2], items[-3]
        if results:
            assert kinds == ["reasoning", "message", "function_call", "function_call"]
            assert (await client.responses.retrieve(response.id)).output_text == "So."
    assert response.output_text == "3 it is."
    assert response.usage.input_tokens_details.cached_tokens == 0
    check_one_conversation(session, 2)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_messages_with_parallel_calls(
    open_anthropic: Callable[[Session], Any], is_stream: bool
) -> None:
    session = make_session(f"<think>Hm.</think>{TWO_CALLS}", "3 it is.", delay_s=0.1)
    client = open_anthropic(session)
    messages: list[Any] = [QUESTION]
    message: Any = None
    for _ in range(2):
        arguments: Any = {
            "model": "any",
            "max_tokens": 4000,
            "system": "Be brief.",
            "messages": messages,
            "tools": [ANTHROPIC_TOOL],
            "thinking": {"type": "enabled", "budget_tokens": 2000},
        }
        count = await client.messages.count_tokens(
            **{name: value for name, value in arguments.items() if name != "max_tokens"}
        )
        if is_stream:
            async with client.messages.stream(**arguments) as stream:
                async for _ in stream:
                    pass
                message = await stream.get_final_message()
        else:
            message = await client.messages.create(**arguments)
        assert message.usage.input_tokens == count.input_tokens
        messages.append({"role": "assistant", "content": message.content})
        results: list[Any] = []
        for block in message.content:
            if block.type == "tool_use":
                result = str(block.input["a"])
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
        if results:
            assert [b.type for b in message.content] == [
                "thinking",
                "text",
                "tool_use",
                "tool_use",
            ]
            messages.append({"role": "user", "content": results})
    assert message.content[-1].text == "3 it is."
    assert message.stop_reason == "end_turn"
    check_one_conversation(session, 2)


async def test_completions_of_tokens(open_openai: Callable[[Session], Any]) -> None:
    session = make_session("4.")
    client = open_openai(session)
    reply = await client.completions.create(model="any", prompt=[4, 5, 6], max_tokens=9, logprobs=1)
    assert reply.choices[0].text == "4."
    assert len(reply.choices[0].logprobs.token_logprobs) == 3


async def test_errors_are_those_of_the_sdks(
    open_openai: Callable[[Session], Any], open_anthropic: Callable[[Session], Any]
) -> None:
    session = make_session()
    client = open_openai(session)
    with pytest.raises(openai.BadRequestError, match="n is 0"):
        await client.chat.completions.create(model="any", messages=[QUESTION], n=0)
    session.close()
    with pytest.raises(openai.ConflictError):
        await client.with_options(max_retries=0).responses.create(model="any", input="Hi.")
    client = open_anthropic(make_session())
    image = {"type": "image", "source": {"type": "url", "url": "http://localhost/"}}
    question = {"role": "user", "content": [image]}
    with pytest.raises(anthropic.BadRequestError, match=r"content\[0\]"):
        await client.messages.create(model="any", max_tokens=9, messages=[question])
    client = open_anthropic(make_session()).with_options(api_key="unknown", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        await client.messages.create(model="any", max_tokens=9, messages=[QUESTION])


async def test_errors_in_streams_are_raised(
    open_openai: Callable[[Session], Any], open_anthropic: Callable[[Session], Any]
) -> None:
    client = open_openai(make_session(RuntimeError("lost"), delay_s=0.1))
    for create, arguments in [
        (client.chat.completions.create, {"messages": [QUESTION]}),
        (client.responses.create, {"input": "Hi."}),
    ]:
        stream = await create(model="any", stream=True, **arguments)
        with pytest.raises(openai.APIError, match="RuntimeError"):
            async for _ in stream:
                pass
    client = open_anthropic(make_session(RuntimeError("lost"), delay_s=0.1))
    stream = await client.messages.create(
        model="any", max_tokens=9, messages=[QUESTION], stream=True
    )
    with pytest.raises(anthropic.APIStatusError, match="RuntimeError"):
        async for _ in stream:
            pass


async def test_an_sdk_that_retries_gets_the_turn_that_it_missed(
    open_openai: Callable[[Session], Any],
) -> None:
    session = make_session("A.", "B.", delay_s=0.3)
    client = open_openai(session).with_options(timeout=0.2)
    reply = await client.chat.completions.create(model="any", messages=[QUESTION])
    assert reply.choices[0].message.content == "A."
    await asyncio.sleep(0.1)
    check_one_conversation(session, 1)


async def test_a_reply_names_its_turn(open_openai: Callable[[Session], Any]) -> None:
    session = make_session()
    reply = await open_openai(session).chat.completions.create(model="any", messages=[QUESTION])
    (turn,) = session.graph.turns()
    assert reply.id == reply._request_id == turn.response_id


async def test_agents_of_one_session_are_named_by_headers_or_by_the_url(
    open_openai: Callable[[Session], Any], open_anthropic: Callable[[Session], Any]
) -> None:
    session = make_session("Yes.")
    client = open_openai(session)
    claude = open_anthropic(session).with_options(default_headers={"x-gcore-agent": "critic"})
    by_url = client.with_options(base_url=str(client.base_url).replace("/v1", "/a/judge/v1"))
    ask = {"model": "any", "messages": [QUESTION]}
    await client.chat.completions.create(**ask, extra_headers={"x-gcore-agent": "planner"})
    await claude.messages.create(**ask, max_tokens=100)
    await by_url.chat.completions.create(**ask)
    with pytest.raises(openai.BadRequestError, match="agent is 'two words'; expected a name"):
        await client.chat.completions.create(**ask, extra_headers={"x-gcore-agent": "two words"})
    agents = [turn.agent for turn in session.graph.turns()]
    assert agents == ["planner", "critic", "judge"]
