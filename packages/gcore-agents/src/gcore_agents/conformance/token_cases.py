"""The cases of Completions, whose prompts are text or tokens."""

from functools import partial

from gcore_agents.conformance.agent import CaseAgent
from gcore_agents.conformance.case import Case
from gcore_agents.conformance.cases import check_texts_differ
from gcore_agents.conformance.errors import CaseNotApplicableError, MismatchError
from gcore_agents.conformance.turns import ModelTurn
from gcore_agents.conformance.wire.client import WireReply, WireRequest

_FIRST = ModelTurn(text="the other one is in the north")
_SECOND = ModelTurn(text="there and then")
_THIRD = ModelTurn(text="another thing in store")
_DIALECTS = ("completions",)


async def continue_tokens(agent: CaseAgent, *, stream: bool = False) -> None:
    turn = await _ask(agent, stream=stream)
    prompt = _path(turn) + _prompt(turn)[:3]
    await agent.send(WireRequest(prompt=prompt, stream=stream))


async def change_token(agent: CaseAgent) -> None:
    turn = await _ask(agent)
    path = _path(turn)
    changed = path[: len(_prompt(turn))] + path[len(_prompt(turn)) + 1 :]
    await agent.send(WireRequest(prompt=changed))


async def sample_again(agent: CaseAgent) -> None:
    turns = [await _ask(agent), await _ask(agent)]
    check_texts_differ(turns)
    for turn in turns:
        await agent.send(WireRequest(prompt=_path(turn) + _prompt(turn)[:3]))


async def sample_several(agent: CaseAgent) -> None:
    turns = await agent.send(WireRequest(prompt=_text(agent), n=3))
    check_texts_differ(turns)
    await agent.send(WireRequest(prompt=_path(turns[1]) + _prompt(turns[1])[:3]))


async def call_again(agent: CaseAgent) -> None:
    request = WireRequest(prompt=_text(agent))
    first = await agent.send(request)
    second = await agent.send(request, headers={"x-stainless-retry-count": "1"})
    if first[0].token_ids != second[0].token_ids:
        raise MismatchError("the retry of a call got another turn; expected the same")


async def stop_at_string(agent: CaseAgent) -> None:
    [turn] = await agent.send(WireRequest(prompt=_text(agent), stop=("STOP",)))
    agent.expect(turn, lambda turn: turn.text.strip() == "the first part", "the text before STOP")
    await agent.send(WireRequest(prompt=_path(turn) + _prompt(turn)[:3]))


async def cut_turn_off(agent: CaseAgent) -> None:
    [turn] = await agent.send(WireRequest(prompt=_text(agent), max_tokens=9))
    agent.expect_end(turn, "length")
    await agent.send(WireRequest(prompt=_path(turn)))


def _text(agent: CaseAgent) -> str:
    return str(agent.user("where is the other tree")["content"])


async def _ask(agent: CaseAgent, *, stream: bool = False) -> WireReply:
    [turn] = await agent.send(WireRequest(prompt=_text(agent), stream=stream))
    return turn


def _prompt(turn: WireReply) -> tuple[int, ...]:
    if turn.prompt_ids is None:
        raise CaseNotApplicableError("replies have no prompt_token_ids")
    return turn.prompt_ids


def _path(turn: WireReply) -> tuple[int, ...]:
    if turn.token_ids is None:
        raise CaseNotApplicableError("replies have no token_ids")
    return (*_prompt(turn), *turn.token_ids)


def list_token_cases() -> list[Case]:
    """Return the cases of Completions."""
    return [
        Case(
            name="tokens-continued",
            summary="A prompt of a turn's tokens and more continues the turn.",
            script=[_FIRST, _SECOND],
            drive=continue_tokens,
            parents=[-1, 0],
            dialects=_DIALECTS,
        ),
        Case(
            name="tokens-streamed",
            summary="So it does if turns are streamed.",
            script=[_FIRST, _SECOND],
            drive=partial(continue_tokens, stream=True),
            parents=[-1, 0],
            dialects=_DIALECTS,
        ),
        Case(
            name="tokens-changed",
            summary="A prompt without one of a turn's tokens starts a branch.",
            script=[_FIRST, _SECOND],
            drive=change_token,
            parents=[-1, -1],
            dialects=_DIALECTS,
        ),
        Case(
            name="tokens-resample",
            summary="An equal call after its reply is a turn next to the first; each can be continued.",
            script=[_FIRST, _SECOND, _THIRD, _FIRST],
            drive=sample_again,
            parents=[-1, -1, 0, 1],
            siblings=[(0, 1)],
            dialects=_DIALECTS,
        ),
        Case(
            name="tokens-several",
            summary="Several turns of one call are next to each other; each can be continued.",
            script=[_FIRST, _SECOND, _THIRD, _FIRST],
            drive=sample_several,
            parents=[-1, -1, -1, 1],
            siblings=[(0, 1), (1, 2)],
            dialects=_DIALECTS,
        ),
        Case(
            name="tokens-retry",
            summary="A call that an SDK marks as a retry gets the turn that is there.",
            script=[_FIRST, _SECOND],
            drive=call_again,
            parents=[-1],
            dialects=_DIALECTS,
        ),
        Case(
            name="tokens-stop-string",
            summary="A stop string ends a turn, whose tokens have it, and whose text has not.",
            script=[ModelTurn(text="the first part STOP the second"), _SECOND],
            drive=stop_at_string,
            parents=[-1, 0],
            dialects=_DIALECTS,
        ),
        Case(
            name="tokens-cut-off",
            summary="A turn that is cut off at its most tokens can be continued by them alone.",
            script=[_FIRST, _SECOND],
            drive=cut_turn_off,
            parents=[-1, 0],
            dialects=_DIALECTS,
        ),
    ]
