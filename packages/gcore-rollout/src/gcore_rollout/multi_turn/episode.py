"""Episodes: a policy and an environment alternate on one growing sequence of tokens."""

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from gcore_rollout.engines.protocol import Completion, Engine, EpisodeEnd, Request, SamplingParams
from gcore_rollout.errors import EpisodeError, RequestError
from gcore_rollout.multi_turn.chat import ChatEncoder
from gcore_rollout.multi_turn.config import MultiTurnConfig
from gcore_rollout.multi_turn.environment import Environment, EpisodeOutcome

T = TypeVar("T")
_logger = logging.getLogger(__name__)


async def run_episode(
    engine: Engine,
    environment: Environment,
    encoder: ChatEncoder,
    *,
    request_id: str,
    sampling: SamplingParams,
    limits: MultiTurnConfig | None = None,
    seed: int = 0,
) -> Completion:
    """Play one episode in a new environment, and return it as one completion of the environment's opening.

    Its score is the sum of the rewards of all turns. Many at once make one continuous stream of requests. Every turn
    continues the exact tokens of those before it. A turn that `Engine.abort` cuts short, as a change of weights may, is
    continued.

    Args:
        engine: the policy.
        encoder: of the policy's tokenizer.
        request_id: prefix of the request ids of its turns.
        sampling: ``max_tokens`` bounds the whole response [R], including the environment's messages.
        limits: of turns, tokens and the environment's time; default: `MultiTurnConfig()`.
        seed: together with the turn's number, determines the random numbers.

    However the episode ends, an environment's method ``close``, if it has one, is awaited once at its end.

    Raises:
        EpisodeError: the environment failed or did not answer in time, or its messages are malformed, refused by the
            chat template or too long.
    """
    limits = limits or MultiTurnConfig()
    outcome: EpisodeOutcome = "failed"
    try:
        episode = await _play(engine, environment, encoder, request_id, sampling, limits, seed)
        outcome = episode.end or "failed"
    except asyncio.CancelledError:
        outcome = "cancelled"
        raise
    finally:
        await _close(environment, outcome, limits.step_timeout_s, f"episode {request_id!r}: close")
    return episode


async def _play(
    engine: Engine,
    environment: Environment,
    encoder: ChatEncoder,
    request_id: str,
    sampling: SamplingParams,
    limits: MultiTurnConfig,
    seed: int,
) -> Completion:
    parameters = inspect.signature(environment.step).parameters
    what = f"episode {request_id!r}: reset"
    opening = await _wait(environment.reset(), limits.step_timeout_s, what)
    with _raise_episode_errors(what):
        prompt_ids = encoder.first(opening.messages, tools=opening.tools)
    response: list[int] = []
    log_probs: list[float] = []
    versions: list[int] = []
    mask: list[bool] = []
    """Whether the policy wrote each token of the response."""
    turns: list[str] = []
    score = 0.0
    end: EpisodeEnd | None = None
    while end is None:
        num_left = sampling.max_tokens - len(response)
        with _raise_episode_errors(f"episode {request_id!r}: turn {len(turns) + 1}"):
            request = Request(
                request_id=f"{request_id}/{len(turns)}",
                session=request_id,
                prompt_token_ids=(*prompt_ids, *response),
                sampling=replace(
                    sampling, max_tokens=min(num_left, limits.max_tokens_per_turn or num_left)
                ),
                seed=hash((seed, len(turns))),
            )
            completion = await _complete_turn(engine, request)
        written = completion.token_ids.tolist()
        response += written
        log_probs += completion.log_probs.tolist()
        versions += completion.weight_versions.tolist()
        mask += [True] * len(written)
        is_truncated = completion.finish_reason != "stop"
        turns.append(encoder.turn_text(written, stop=sampling.stop, is_ended=not is_truncated))
        what = f"episode {request_id!r}: step {len(turns)}"
        options: dict[str, Any] = {}
        if "truncated" in parameters:
            options["truncated"] = is_truncated
        if "calls" in parameters:
            # Of a turn that was cut off none is run.
            options["calls"] = []
            if not is_truncated:
                with _raise_episode_errors(what):
                    options["calls"] = encoder.calls(turns[-1], opening.tools)
        reply = await _wait(environment.step(turns[-1], **options), limits.step_timeout_s, what)
        if not math.isfinite(reply.reward):
            raise EpisodeError(f"{what}: the reward is {reply.reward}; expected a finite number")
        score += reply.reward
        if reply.done:
            end = "done"
        elif is_truncated:
            # A turn that was cut off has no end after which a message could come.
            end = "truncated_turn"
            if len(response) >= sampling.max_tokens:
                end = "length"
        elif len(turns) == limits.max_assistant_turns:
            end = "max_turns"
        else:
            with _raise_episode_errors(what):
                added = encoder.next(reply.messages, last_token=response[-1])
            if len(response) + len(added) >= sampling.max_tokens:
                end = "length"
            else:
                response += added
                log_probs += [0.0] * len(added)
                versions += [-1] * len(added)
                mask += [False] * len(added)
    return Completion(
        request_id=request_id,
        index=0,
        finish_reason="stop" if end == "done" else "length",
        prompt_ids=np.array(prompt_ids, np.int64),
        token_ids=np.array(response, np.int64),
        mask=np.array(mask, np.bool_),
        log_probs=np.array(log_probs, np.float32),
        weight_versions=np.array(versions, np.int32),
        turns=tuple(turns),
        score=score,
        end=end,
    )


@contextmanager
def _raise_episode_errors(what: str) -> Generator[None]:
    """Raise an `EpisodeError` for messages or a prompt that are refused: other episodes are not affected."""
    try:
        yield
    except RequestError as error:
        raise EpisodeError(f"{what}: {error}") from error


async def _close(
    environment: Environment, outcome: EpisodeOutcome, timeout_s: float, what: str
) -> None:
    """Close an environment that can be closed; an `EpisodeError` unless the episode has failed already."""
    close: Callable[[str], Awaitable[None]] | None = getattr(environment, "close", None)
    if close is None:
        return
    try:
        await _wait(close(outcome), timeout_s, what)
    except EpisodeError as error:
        if outcome not in ("failed", "cancelled"):
            raise
        _logger.warning("%s", error)


async def _complete_turn(engine: Engine, request: Request) -> Completion:
    """Generate a whole turn, through as many requests as it takes."""
    while True:
        [completion] = [c async for c in engine.generate([request])]
        if completion.finish_reason != "abort":
            return completion
        request = replace(request, prefixes=(completion,))


async def _wait(answer: Awaitable[T], timeout_s: float, what: str) -> T:
    """Wait for an environment's answer; `EpisodeError` if it failed or took too long."""
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        raise EpisodeError(f"{what} took longer than {timeout_s} s") from None
    except (Exception, SystemExit) as error:
        raise EpisodeError(f"{what}: {type(error).__name__}: {error}") from error
