"""The cases of dialects of messages."""

import asyncio
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

from gcore_agents.conformance.agent import CaseAgent
from gcore_agents.conformance.case import Case
from gcore_agents.conformance.errors import CaseNotApplicableError, MismatchError
from gcore_agents.conformance.turns import TOOLS, FunctionCall, ModelTurn, results, system
from gcore_agents.conformance.wire.client import WireReply, WireRequest, WriteStyle
from gcore_agents.session import SessionBudget

_ADD = FunctionCall(name="add", arguments={"first": 1, "second": 2})
_LOOK_UP = FunctionCall(name="look_up", arguments={"word": "other tree"})
_FIRST = ModelTurn(text="the other one is in the north")
_SECOND = ModelTurn(text="there and then")
_THIRD = ModelTurn(text="another thing in store")
_CALL = ModelTurn(calls=[_ADD])
_THOUGHT = ModelTurn(text="the answer is three", reasoning="one and then another two")
_QUESTION = "where is the other tree"
_MORE = "and then"


async def ask_twice(agent: CaseAgent) -> None:
    messages = [agent.user(_QUESTION)]
    turn = await agent.ask(messages)
    await agent.ask([*messages, turn.message, agent.user(_MORE)])


async def ask_with_system(agent: CaseAgent) -> None:
    messages = [system("be brief"), agent.user(_QUESTION)]
    turn = await agent.ask(messages)
    await agent.ask([*messages, turn.message, agent.user(_MORE)])


async def call_tool(agent: CaseAgent, **options: Any) -> None:
    """Send a call's result; ``options`` are fields of `WireRequest`."""
    messages = [agent.user(_QUESTION)]
    turn = await agent.ask(messages, tools=TOOLS, **options)
    agent.expect_calls(turn, 1)
    further = [*messages, turn.message, *results(turn.message, "three")]
    await agent.ask(further, tools=TOOLS, **options)


async def call_two_tools(agent: CaseAgent) -> None:
    messages = [agent.user(_QUESTION)]
    turn = await agent.ask(messages, tools=TOOLS)
    agent.expect_calls(turn, 2)
    further = [*messages, turn.message, *results(turn.message, "three", "an oak")]
    await agent.ask(further, tools=TOOLS)


async def work_several_rounds(agent: CaseAgent) -> None:
    messages = [agent.user(_QUESTION)]
    for text in ("three", "an oak"):
        turn = await agent.ask(messages, tools=TOOLS)
        agent.expect_calls(turn, 1)
        messages += [turn.message, *results(turn.message, text)]
    turn = await agent.ask(messages, tools=TOOLS)
    messages += [turn.message, agent.user(_MORE)]
    turn = await agent.ask(messages, tools=TOOLS)
    agent.expect_calls(turn, 1)
    messages += [turn.message, *results(turn.message, "four")]
    await agent.ask(messages, tools=TOOLS)


async def write_parts(agent: CaseAgent) -> None:
    messages = [agent.user(_QUESTION)]
    turn = await agent.ask(messages)
    further = [*messages, turn.message, agent.user(_MORE)]
    await agent.ask(further, style=WriteStyle(content="parts"))


async def change_text(agent: CaseAgent) -> None:
    messages = [agent.user(_QUESTION)]
    turn = await agent.ask(messages)
    changed = {**turn.message, "content": turn.text + " and more"}
    await agent.ask([*messages, changed, agent.user(_MORE)])


async def change_arguments(agent: CaseAgent) -> None:
    messages = [agent.user(_QUESTION)]
    turn = await agent.ask(messages, tools=TOOLS)
    agent.expect_calls(turn, 1)
    call = turn.calls[0]
    function = {"name": "add", "arguments": {"first": 8, "second": 2}}
    changed = {**turn.message, "tool_calls": [{**call, "function": function}]}
    await agent.ask([*messages, changed, *results(changed, "ten")], tools=TOOLS)


async def edit_reasoning(agent: CaseAgent, *, reasoning: str) -> None:
    messages = [agent.user(_QUESTION)]
    turn = await agent.ask(messages)
    agent.expect(turn, lambda turn: "reasoning_content" in turn.message, "reasoning")
    edited = {**turn.message, "reasoning_content": reasoning}
    await agent.ask([*messages, edited, agent.user(_MORE)])


async def change_system(agent: CaseAgent) -> None:
    old = [system("today is monday"), agent.user(_QUESTION)]
    turn = await agent.ask(old)
    changed = [system("today is tuesday"), *old[1:], turn.message, agent.user(_MORE)]
    await agent.ask(changed)
    await agent.ask([*old, turn.message, agent.user(_MORE)])


async def run_sub_agent(agent: CaseAgent) -> None:
    messages = [agent.user(_QUESTION)]
    turn = await agent.ask(messages)
    sub_messages = [agent.user("a question of another agent")]
    sub_turn = await agent.ask(sub_messages)
    await agent.ask([*messages, turn.message, agent.user(sub_turn.text or _MORE)])
    await agent.ask([*sub_messages, sub_turn.message, agent.user(_MORE)])


async def run_sub_agents_at_once(agent: CaseAgent) -> None:
    texts = ("the first task", "the second task", "the third task")
    requests = [WireRequest(messages=[agent.user(text)]) for text in texts]
    await asyncio.gather(*map(agent.exchange, requests))


async def replace_history(agent: CaseAgent) -> None:
    messages = [agent.user(_QUESTION)]
    turn = await agent.ask(messages)
    await agent.ask([*messages, turn.message, agent.user(_MORE)])
    await agent.ask([agent.user("so far there is a tree"), turn.message, agent.user(_MORE)])


async def change_question(agent: CaseAgent) -> None:
    messages = [agent.user(_QUESTION)]
    turn = await agent.ask(messages)
    for text in (_MORE, "or is it not there"):
        await agent.ask([*messages, turn.message, agent.user(text)])


async def call_at_once(agent: CaseAgent) -> None:
    request = WireRequest(messages=[agent.user(_QUESTION)])
    first, second = await asyncio.gather(agent.exchange(request), agent.exchange(request))
    if first[0].response_id != second[0].response_id:
        raise MismatchError("two equal calls at once got two turns; expected one")


async def call_again_by_count(agent: CaseAgent) -> None:
    await _call_again(agent, {}, {"x-stainless-retry-count": "1"})


async def call_again_by_key(agent: CaseAgent) -> None:
    headers = {"Idempotency-Key": secrets.token_hex(8)}
    await _call_again(agent, headers, headers)


async def _call_again(
    agent: CaseAgent, headers: dict[str, str], retry_headers: dict[str, str]
) -> None:
    request = WireRequest(messages=[agent.user(_QUESTION)])
    first = await agent.send(request, headers=headers)
    second = await agent.send(request, headers=retry_headers)
    if first[0].response_id != second[0].response_id:
        raise MismatchError("the retry of a call got another turn; expected the same")


async def give_up_and_retry(agent: CaseAgent) -> None:
    request = WireRequest(messages=[agent.user(_QUESTION)])
    await agent.give_up(request, after_s=0.03)
    [turn] = await agent.send(request, headers={"x-stainless-retry-count": "1"})
    await agent.ask([*request.messages, turn.message, agent.user(_MORE)])


async def give_up(agent: CaseAgent) -> None:
    messages = [agent.user(_QUESTION)]
    await agent.give_up(WireRequest(messages=messages), after_s=0.03)
    await asyncio.sleep(0.15)


def check_texts_differ(turns: Sequence[WireReply]) -> None:
    """Raise a `CaseNotApplicableError` if two turns have one text: nothing says then which one is continued."""
    texts = {turn.text for turn in turns}
    if len(texts) < len(turns):
        raise CaseNotApplicableError("two of the turns have the same text")


async def sample_again(agent: CaseAgent) -> None:
    messages = [agent.user(_QUESTION)]
    turns = [await agent.ask(messages), await agent.ask(messages)]
    check_texts_differ(turns)
    for turn in turns:
        await agent.ask([*messages, turn.message, agent.user(_MORE)])


async def sample_several(agent: CaseAgent) -> None:
    messages = [agent.user(_QUESTION)]
    turns = await agent.ask_all(messages, n=3)
    check_texts_differ(turns)
    await agent.ask([*messages, turns[1].message, agent.user(_MORE)])


async def stop_at_string(agent: CaseAgent) -> None:
    messages = [agent.user(_QUESTION)]
    turn = await agent.ask(messages, stop=("STOP",))
    agent.expect(turn, lambda turn: turn.text.strip() == "the first part", "the text before STOP")
    agent.expect_end(turn, "stop")
    await agent.ask([*messages, turn.message, agent.user(_MORE)], stop=("STOP",))


async def cut_turn_off(agent: CaseAgent) -> None:
    messages = [agent.user(_QUESTION)]
    turn = await agent.ask(messages, max_tokens=9)
    agent.expect_end(turn, "length")
    await agent.ask([*messages, turn.message, agent.user(_MORE)])


async def cut_call_off(agent: CaseAgent) -> None:
    messages = [agent.user(_QUESTION)]
    turn = await agent.ask(messages, tools=TOOLS, max_tokens=25)
    agent.expect_end(turn, "length")
    agent.expect_calls(turn, 0)
    await agent.ask([*messages, turn.message, agent.user(_MORE)], tools=TOOLS)


async def use_budget_up(agent: CaseAgent) -> None:
    messages = [agent.user(_QUESTION)]
    turn = await agent.ask(messages)
    further = [*messages, turn.message, agent.user(_MORE)]
    for stream in (False, True):
        last = await agent.ask(further, stream=stream)
        agent.expect(
            last,
            lambda last: bool(last.text) and last.finish_reason == "stop",
            "a text that ends the loop",
        )


async def continue_response(agent: CaseAgent) -> None:
    turn = await agent.ask([agent.user(_QUESTION)], tools=TOOLS)
    agent.expect_calls(turn, 1)
    await agent.ask(results(turn.message, "three"), tools=TOOLS, previous_response=turn.response_id)


def list_cases() -> list[Case]:
    """Return the cases of dialects of messages."""
    return [
        Case(
            name="two-turns",
            summary="A second question continues the first turn.",
            script=[_FIRST, _SECOND],
            drive=ask_twice,
            parents=[-1, 0],
        ),
        Case(
            name="system-message",
            summary="So it does after a system message.",
            script=[_FIRST, _SECOND],
            drive=ask_with_system,
            parents=[-1, 0],
            needs=frozenset({"system"}),
        ),
        Case(
            name="tool-call",
            summary="The result of a call continues the turn that made it.",
            script=[_CALL, _SECOND],
            drive=call_tool,
            parents=[-1, 0],
            needs=frozenset({"results"}),
        ),
        Case(
            name="text-and-call",
            summary="So it does if the turn has a text, too.",
            script=[ModelTurn(text="let me see", calls=[_LOOK_UP]), _SECOND],
            drive=call_tool,
            parents=[-1, 0],
            needs=frozenset({"results"}),
        ),
        Case(
            name="thought-and-call",
            summary="So it does if the turn has reasoning, too.",
            script=[ModelTurn(reasoning="one and then another two", calls=[_ADD]), _SECOND],
            drive=call_tool,
            parents=[-1, 0],
            needs=frozenset({"results"}),
        ),
        Case(
            name="parallel-calls",
            summary="Results of several calls continue their turn together.",
            script=[ModelTurn(calls=[_ADD, _LOOK_UP]), _SECOND],
            drive=call_two_tools,
            parents=[-1, 0],
            needs=frozenset({"results"}),
        ),
        Case(
            name="several-rounds",
            summary="Five turns over two questions, with reasoning and calls, are one path.",
            script=[
                ModelTurn(reasoning="one and then another two", calls=[_ADD]),
                ModelTurn(reasoning="another thing", calls=[_LOOK_UP]),
                _THOUGHT,
                ModelTurn(reasoning="there is more", calls=[_ADD]),
                _SECOND,
            ],
            drive=work_several_rounds,
            parents=[-1, 0, 1, 2, 3],
            needs=frozenset({"results"}),
        ),
        Case(
            name="several-rounds-plain",
            summary="So they are without reasoning.",
            script=[_CALL, ModelTurn(calls=[_LOOK_UP]), _FIRST, _CALL, _SECOND],
            drive=work_several_rounds,
            parents=[-1, 0, 1, 2, 3],
            needs=frozenset({"results"}),
        ),
        Case(
            name="stream",
            summary="A streamed turn is the same as one that is not, and so is its continuation.",
            script=[_CALL, _SECOND],
            drive=partial(call_tool, stream=True),
            parents=[-1, 0],
            needs=frozenset({"results"}),
        ),
        Case(
            name="reasoning-kept",
            summary="Reasoning that is sent back continues its turn.",
            script=[_THOUGHT, _SECOND],
            drive=ask_twice,
            parents=[-1, 0],
        ),
        Case(
            name="reasoning-dropped",
            summary="A turn that is sent back without its reasoning is continued as it was sampled.",
            script=[_THOUGHT, _SECOND],
            drive=partial(edit_reasoning, reasoning=""),
            parents=[-1, 0],
        ),
        Case(
            name="reasoning-changed",
            summary="Reasoning that is sent back changed starts a branch.",
            script=[_THOUGHT, _SECOND],
            drive=partial(edit_reasoning, reasoning="not at all"),
            parents=[-1, -1],
        ),
        Case(
            name="content-parts",
            summary="A text that is sent back as a list of parts is the same.",
            script=[_FIRST, _SECOND],
            drive=write_parts,
            parents=[-1, 0],
        ),
        Case(
            name="content-empty",
            summary='Content "" next to calls is the same as null.',
            script=[_CALL, _SECOND],
            drive=partial(call_tool, style=WriteStyle(empty="text")),
            parents=[-1, 0],
            dialects=("chat",),
            needs=frozenset({"results"}),
        ),
        Case(
            name="content-missing",
            summary="Content that is missing next to calls is the same as null.",
            script=[_CALL, _SECOND],
            drive=partial(call_tool, style=WriteStyle(empty="missing")),
            parents=[-1, 0],
            dialects=("chat",),
            needs=frozenset({"results"}),
        ),
        Case(
            name="arguments-rewritten",
            summary="Arguments with other spaces and another order of keys are the same.",
            script=[_CALL, _SECOND],
            drive=partial(call_tool, style=WriteStyle(arguments="spaced")),
            parents=[-1, 0],
            needs=frozenset({"results"}),
        ),
        Case(
            name="arguments-changed",
            summary="Arguments with another value start a branch; the turn stays as it was.",
            script=[_CALL, _SECOND],
            drive=change_arguments,
            parents=[-1, -1],
            needs=frozenset({"results"}),
        ),
        Case(
            name="text-changed",
            summary="A turn whose text is sent back changed starts a branch, and stays as it was.",
            script=[_FIRST, _SECOND],
            drive=change_text,
            parents=[-1, -1],
        ),
        Case(
            name="question-changed",
            summary="Two questions after one turn are two branches.",
            script=[_FIRST, _SECOND, _THIRD],
            drive=change_question,
            parents=[-1, 0, 0],
        ),
        Case(
            name="system-changed",
            summary="Another system message starts a branch, and the old conversation can be continued.",
            script=[_FIRST, _SECOND, _THIRD],
            drive=change_system,
            parents=[-1, -1, 0],
            needs=frozenset({"system"}),
        ),
        Case(
            name="history-replaced",
            summary="Messages that replace earlier ones, as when a history is summed up, start a branch.",
            script=[_FIRST, _SECOND, _THIRD],
            drive=replace_history,
            parents=[-1, 0, -1],
        ),
        Case(
            name="sub-agent",
            summary="A conversation of another agent in the same session is a tree of its own.",
            script=[_FIRST, _SECOND, _THIRD, _FIRST],
            drive=run_sub_agent,
            parents=[-1, -1, 0, 1],
        ),
        Case(
            name="agents-at-once",
            summary="Calls of several agents at once are linked by what they say.",
            script=[_FIRST, _SECOND, _THIRD],
            drive=run_sub_agents_at_once,
            parents=[-1, -1, -1],
            delay_s=0.02,
        ),
        Case(
            name="retry-in-flight",
            summary="A call that is repeated before its reply is one turn.",
            script=[_FIRST, _SECOND],
            drive=call_at_once,
            parents=[-1],
            delay_s=0.05,
        ),
        Case(
            name="retry-count",
            summary="A call that an SDK marks as a retry gets the turn that is there.",
            script=[_FIRST, _SECOND],
            drive=call_again_by_count,
            parents=[-1],
        ),
        Case(
            name="retry-key",
            summary="So does one with the Idempotency-Key of another.",
            script=[_FIRST, _SECOND],
            drive=call_again_by_key,
            parents=[-1],
        ),
        Case(
            name="retry-after-hang-up",
            summary="A client that hangs up and asks again gets one turn, and continues it.",
            script=[_FIRST, _SECOND],
            drive=give_up_and_retry,
            parents=[-1, 0],
            delay_s=0.1,
            is_scripted=True,
        ),
        Case(
            name="hang-up",
            summary="The turn of a client that hangs up and does not ask again counts as not delivered.",
            script=[_FIRST],
            drive=give_up,
            parents=[-1],
            undelivered=[0],
            delay_s=0.1,
            is_scripted=True,
        ),
        Case(
            name="resample",
            summary="An equal call after its reply is a turn next to the first; each can be continued.",
            script=[_FIRST, _SECOND, _THIRD, _FIRST],
            drive=sample_again,
            parents=[-1, -1, 0, 1],
            siblings=[(0, 1)],
        ),
        Case(
            name="several-turns",
            summary="Several turns of one call are next to each other; each can be continued.",
            script=[_FIRST, _SECOND, _THIRD, _FIRST],
            drive=sample_several,
            parents=[-1, -1, -1, 1],
            siblings=[(0, 1), (1, 2)],
            dialects=("chat", "google"),
        ),
        Case(
            name="stop-string",
            summary="A stop string ends a turn, whose tokens have it, and whose text has not.",
            script=[ModelTurn(text="the first part STOP the second"), _SECOND],
            drive=stop_at_string,
            parents=[-1, 0],
            dialects=("chat", "anthropic", "google"),
        ),
        Case(
            name="cut-off",
            summary="A turn that is cut off at its most tokens can be continued.",
            script=[_FIRST, _SECOND],
            drive=cut_turn_off,
            parents=[-1, 0],
        ),
        Case(
            name="thought-cut-off",
            summary="So can one that is cut off in its reasoning.",
            script=[_THOUGHT, _SECOND],
            drive=cut_turn_off,
            parents=[-1, 0],
        ),
        Case(
            name="call-cut-off",
            summary="A turn that is cut off in a call has no call, and can be continued.",
            script=[_CALL, _SECOND],
            drive=cut_call_off,
            parents=[-1, 0],
            needs=frozenset({"results"}),
        ),
        Case(
            name="budget-end",
            summary="After the last turn of a budget a text ends the agent's loop, and is no turn.",
            script=[_FIRST, _SECOND],
            drive=use_budget_up,
            parents=[-1],
            budget=SessionBudget(max_tokens=100_000, max_calls=1),
            is_scripted=True,
        ),
        Case(
            name="previous-response",
            summary="previous_response_id continues the turn that it names.",
            script=[_CALL, _SECOND],
            drive=continue_response,
            parents=[-1, 0],
            dialects=("responses",),
            needs=frozenset({"results"}),
        ),
    ]
