"""The cases of ``cases.toml``, which explains their fields, and how their steps are played."""

import asyncio
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import Any, TypeAlias

from gcore_agents.conformance.agent import CaseAgent
from gcore_agents.conformance.case import Case
from gcore_agents.conformance.errors import CaseNotApplicableError, MismatchError
from gcore_agents.conformance.turns import TOOLS, ModelTurn, results, system
from gcore_agents.conformance.wire.client import WireReply, WireRequest, WriteStyle
from gcore_agents.graph import Message

_FILE = files("gcore_agents.conformance") / "cases.toml"

Step: TypeAlias = Mapping[str, Any]
Exchange: TypeAlias = tuple[WireRequest, list[WireReply]]


def list_cases() -> list[Case]:
    """Return the cases of all dialects."""
    content = tomllib.loads(_FILE.read_text())
    turns = {name: ModelTurn(**fields) for name, fields in content["turns"].items()}
    cases: list[Case] = []
    for fields in content["cases"]:
        options = fields.pop("options", {})
        steps = [{**options, **step} for step in fields.pop("steps")]
        play = play_at_once if fields.pop("at_once", False) else play_in_turn
        script = [turns[name] for name in fields.pop("script")]
        cases.append(Case(**fields, script=script, drive=partial(play, steps)))
    return cases


async def play_in_turn(steps: Sequence[Step], agent: CaseAgent) -> None:
    """Make the calls of a case one after the other, and check their replies."""
    key = secrets.token_hex(8)
    headers = {"count": {"x-stainless-retry-count": "1"}, "key": {"Idempotency-Key": key}}
    exchanges: list[Exchange] = []
    for step in steps:
        if step.get("needs_distinct"):
            _check_texts_differ(exchanges)
        request = _make_request(step, exchanges, agent)
        replies: list[WireReply] = []
        if "hang_up_s" in step:
            await agent.give_up(request, after_s=step["hang_up_s"])
        else:
            replies = await agent.send(request, headers=headers.get(step.get("retry", "")))
        exchanges.append((request, replies))
        _check_step(step, exchanges, agent)
        await asyncio.sleep(step.get("wait_s", 0.0))


async def play_at_once(steps: Sequence[Step], agent: CaseAgent) -> None:
    """Make the calls of a case at the same time."""
    requests = [_make_request(step, [], agent) for step in steps]
    replies = await asyncio.gather(*map(agent.exchange, requests))
    exchanges = list(zip(requests, replies, strict=True))
    for number, step in enumerate(steps):
        _check_step(step, exchanges[: number + 1], agent)


def _make_request(step: Step, exchanges: Sequence[Exchange], agent: CaseAgent) -> WireRequest:
    options = {name: step[name] for name in ("max_tokens", "n", "stream") if name in step}
    options["stop"] = tuple(step.get("stop", ()))
    if agent.client.name == "completions":
        return WireRequest(prompt=_make_prompt(step, exchanges, agent), **options)
    if step.get("tools"):
        options["tools"] = TOOLS
    options["style"] = WriteStyle(**step.get("style", {}))
    messages: list[Message] = []
    if "after" in step:
        request, replies = exchanges[step["after"]]
        turn = replies[step.get("turn", 0)]
        message = _edit_message(turn.message, step.get("edit", {}))
        if step.get("by_id"):
            options["previous_response"] = turn.response_id
        else:
            before = step.get("before")
            messages += request.messages if before is None else _make_messages(before, agent)
            messages.append(message)
        if "results" in step:
            messages += results(message, *step["results"])
    messages += _make_messages(step, agent)
    if "quotes" in step:
        quoted = exchanges[step["quotes"]][1][0].text
        messages.append(agent.user(quoted or "and then"))
    return WireRequest(messages=messages, **options)


def _make_messages(fields: Step, agent: CaseAgent) -> list[Message]:
    messages: list[Message] = []
    if "system" in fields:
        messages.append(system(fields["system"]))
    if "user" in fields:
        messages.append(agent.user(fields["user"]))
    return messages


def _edit_message(message: Message, edit: Mapping[str, Any]) -> Message:
    """Return a turn as a client sends it back."""
    edited = {**message}
    for name, value in edit.items():
        if name == "arguments":
            [call] = message["tool_calls"]
            function = {"name": "add", "arguments": value}
            edited["tool_calls"] = [{**call, "function": function}]
        else:
            edited[name] = value.replace("{content}", message["content"])
    return edited


def _make_prompt(step: Step, exchanges: Sequence[Exchange], agent: CaseAgent) -> str | list[int]:
    """Return a prompt of Completions: the text of the first step, or the tokens of the continued turn and more."""
    if "after" not in step:
        return agent.user(step["user"])["content"]
    turn = exchanges[step["after"]][1][step.get("turn", 0)]
    if turn.prompt_ids is None:
        raise CaseNotApplicableError("replies have no prompt_token_ids")
    if turn.token_ids is None:
        raise CaseNotApplicableError("replies have no token_ids")
    start = 1 if step.get("drops_token") else 0
    more = turn.prompt_ids[: step.get("more_tokens", 0)]
    return [*turn.prompt_ids, *turn.token_ids[start:], *more]


def _check_step(step: Step, exchanges: Sequence[Exchange], agent: CaseAgent) -> None:
    """Check the reply of the last exchange, unless the client has hung up."""
    replies = exchanges[-1][1]
    if not replies:
        return
    reply = replies[0]
    if step.get("has_reasoning"):
        agent.expect(reply, "reasoning_content" in reply.message, "reasoning")
    if "text" in step:
        agent.expect(reply, reply.text.strip() == step["text"], f"the text {step['text']!r}")
    if "end" in step:
        agent.expect(reply, reply.finish_reason == step["end"], f"the end {step['end']!r}")
    if "calls" in step:
        agent.expect(reply, len(reply.calls) == step["calls"], f"{step['calls']} calls of tools")
    if step.get("ends_loop"):
        ends_loop = reply.text != "" and reply.finish_reason == "stop"
        agent.expect(reply, ends_loop, "a text that ends the loop")
    if "same_as" in step:
        first = exchanges[step["same_as"]][1][0]
        if reply.response_id != first.response_id:
            raise MismatchError("two equal calls got two turns; expected one")


def _check_texts_differ(exchanges: Sequence[Exchange]) -> None:
    """Raise a `CaseNotApplicableError` if two turns have one text: nothing says then which one is continued."""
    texts: list[str] = []
    for _, replies in exchanges:
        texts.extend(reply.text for reply in replies)
    if len(set(texts)) < len(texts):
        raise CaseNotApplicableError("two of the turns have the same text")
