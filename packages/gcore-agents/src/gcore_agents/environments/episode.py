"""Episodes: an environment is the agent of a session, and answers each turn of the policy."""

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from gcore_agents.calls import ChatCall, ChatReply
from gcore_agents.chat.messages import normalize_messages
from gcore_agents.environments.environment import Environment, EpisodeOutcome, Opening, Reply
from gcore_agents.errors import AgentFailedError, CallError, MessageError
from gcore_agents.session import Session, SessionEnd, SessionReward

T = TypeVar("T")
_logger = logging.getLogger(__name__)


async def run_episode(session: Session, environment: Environment, *, timeout_s: float) -> list[str]:
    """Play one episode of a new environment in a new session, and return the texts of the policy's turns.

    The rewards of turns are the session's, and `Session.end` is how the episode ended. However it ends, the session is
    closed, and an environment's method ``close``, if it has one, is awaited once at its end.

    Args:
        session: its budget bounds turns and tokens.
        environment: answers the turns.
        timeout_s: of each answer.

    Raises:
        AgentFailedError: the environment failed or did not answer in time, or its messages are malformed, refused by
            the chat template or too long.
    """
    outcome: EpisodeOutcome = "failed"
    try:
        turns = await _play(session, environment, timeout_s)
        outcome = session.end or "failed"
    except asyncio.CancelledError:
        outcome = "cancelled"
        raise
    finally:
        session.close()
        await _close(environment, outcome, timeout_s, f"episode {session.session_id!r}: close")
    return turns


async def _play(session: Session, environment: Environment, timeout_s: float) -> list[str]:
    parameters = inspect.signature(environment.step).parameters
    name = f"episode {session.session_id!r}"
    what = f"{name}: reset"
    opening: Opening = await _wait(environment.reset(), timeout_s, what)
    turns: list[str] = []
    messages: list[Any] = []
    further = opening.messages
    while True:
        with _raise_failures(what):
            keeps_parts = session.encoder.vision is not None
            messages.extend(normalize_messages(further, keeps_parts=keeps_parts))
        with _raise_failures(f"{name}: turn {len(turns) + 1}"):
            reply = await _take_turn(session, ChatCall(messages=messages, tools=opening.tools))
        if reply is None:
            return turns
        is_truncated = reply.finish_reason == "length"
        turns.append(session.turn_text(reply.response_id))
        messages.append(reply.message)
        what = f"{name}: step {len(turns)}"
        options: dict[str, Any] = {}
        if "truncated" in parameters:
            options["truncated"] = is_truncated
        if "calls" in parameters:
            # Of a turn that was cut off none is run.
            options["calls"] = []
            if not is_truncated:
                options["calls"] = session.encoder.calls(turns[-1], opening.tools)
        answer: Reply = await _wait(environment.step(turns[-1], **options), timeout_s, what)
        if not math.isfinite(answer.reward):
            raise AgentFailedError(
                f"{what}: the reward is {answer.reward}; expected a finite number"
            )
        session.add_reward(SessionReward(value=answer.reward, response_id=reply.response_id))
        session.end = _find_end(session, answer, is_truncated, len(turns))
        if session.end is not None:
            return turns
        further = answer.messages


async def _take_turn(session: Session, call: ChatCall) -> ChatReply | None:
    """Return the next turn; None: the budget was used up."""
    [reply] = await session.respond(call)
    session.mark_delivered([reply])
    if not reply.token_ids:
        return None
    return reply


def _find_end(
    session: Session, answer: Reply, is_truncated: bool, num_turns: int
) -> SessionEnd | None:
    """Return how the episode ends with this answer; None: it continues."""
    if answer.done:
        return "done"
    if is_truncated and session.num_used_tokens < session.budget.max_tokens:
        # A turn that was cut off has no end after which a message could come.
        return "truncated_turn"
    if is_truncated:
        return "length"
    if session.budget.max_calls and num_turns >= session.budget.max_calls:
        return "max_turns"
    return None


@contextmanager
def _raise_failures(what: str) -> Generator[None]:
    """Raise an `AgentFailedError` for messages or a prompt that are refused: other episodes are not affected."""
    try:
        yield
    except (MessageError, CallError) as error:
        raise AgentFailedError(f"{what}: {error}") from error


async def _close(
    environment: Environment, outcome: EpisodeOutcome, timeout_s: float, what: str
) -> None:
    """Close an environment that can be closed; an `AgentFailedError` unless the episode has failed already."""
    close: Callable[[str], Awaitable[None]] | None = getattr(environment, "close", None)
    if close is None:
        return
    try:
        await _wait(close(outcome), timeout_s, what)
    except AgentFailedError as error:
        if outcome not in ("failed", "cancelled"):
            raise
        _logger.warning("%s", error)


async def _wait(answer: Awaitable[T], timeout_s: float, what: str) -> T:
    """Wait for an environment's answer; `AgentFailedError` if it failed or took too long."""
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        raise AgentFailedError(f"{what} took longer than {timeout_s} s") from None
    except (Exception, SystemExit) as error:
        raise AgentFailedError(f"{what}: {type(error).__name__}: {error}") from error
