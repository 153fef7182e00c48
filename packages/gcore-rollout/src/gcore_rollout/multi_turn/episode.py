"""Episodes: a policy and an environment alternate on one growing sequence of tokens."""

import asyncio
import dataclasses
import inspect
import math
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.engines.protocol import Completion, Engine, Request, SamplingParams
from gcore_rollout.errors import EpisodeError, RequestError
from gcore_rollout.multi_turn.chat import ChatEncoder
from gcore_rollout.multi_turn.environment import Environment

T = TypeVar("T")
_Piece = tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.float32], NDArray[np.int32]]
"""Token ids, where the policy wrote them, log-probs and weight versions of a part of the response."""
EpisodeEnd = Literal["done", "truncated_turn", "length", "max_turns"]
"""The environment ended it; a turn was cut off before its end, such as at ``max_tokens_per_turn``; the tokens of the
episode were used up; its turns were."""


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """Limits of an episode."""

    max_turns: int = 8
    """Largest number of turns of the policy."""
    max_tokens_per_turn: int | None = None
    """Largest number of tokens of a turn; None: the rest of the episode's."""
    step_timeout_s: float = 60.0
    """Time limit of the environment to answer one turn, or to start."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens_per_turn", "step_timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise RequestError(f"{name} is {value}; expected a finite number above 0")


@dataclass(frozen=True, kw_only=True, eq=False)
class Episode:
    """A finished episode as one prompt and one response. Arrays have shape [R], R the response's length."""

    prompt_ids: NDArray[np.int64]
    """[P] tokens before the policy's first token."""
    token_ids: NDArray[np.int64]
    """All turns of the policy, and the environment's messages between them."""
    response_mask: NDArray[np.bool_]
    """Where the policy wrote the token."""
    log_probs: NDArray[np.float32]
    """As `Completion.log_probs`; 0 where the environment wrote."""
    weight_versions: NDArray[np.int32]
    """Version of the weights that made each token; -1 where the environment wrote."""
    turns: tuple[str, ...]
    """The policy's turns as text."""
    score: float
    """Sum of the rewards of all turns."""
    end: EpisodeEnd


async def run_episode(
    engine: Engine,
    environment: Environment,
    encoder: ChatEncoder,
    *,
    request_id: str,
    sampling: SamplingParams,
    limits: EpisodeLimits | None = None,
    seed: int = 0,
) -> Episode:
    """Play one episode. Many at once make one continuous stream of requests.

    Every turn continues the exact tokens of those before it. A turn that `Engine.abort` cuts short, as a change of
    weights may, is continued.

    Args:
        engine: the policy.
        environment: a new one.
        encoder: of the policy's tokenizer.
        request_id: prefix of the request ids of its turns.
        sampling: ``max_tokens`` bounds the whole response [R], including the environment's messages.
        limits: default: `EpisodeLimits()`.
        seed: together with the turn's number, determines the random numbers.

    Raises:
        EpisodeError: the environment failed, or did not answer in time.
        RequestError: the first messages do not fit the model.
    """
    limits = limits or EpisodeLimits()
    takes_truncated = "truncated" in inspect.signature(environment.step).parameters
    opening = await _within(environment.reset(), limits.step_timeout_s, f"episode {request_id!r}: reset")
    prompt_ids = encoder.first(opening.messages, tools=opening.tools)
    pieces: list[_Piece] = []
    response: list[int] = []
    turns: list[str] = []
    score = 0.0
    end: EpisodeEnd | None = None
    while end is None:
        num_left = sampling.max_tokens - len(response)
        request = Request(
            request_id=f"{request_id}/{len(turns)}",
            prompt_token_ids=(*prompt_ids, *response),
            sampling=dataclasses.replace(sampling, max_tokens=min(num_left, limits.max_tokens_per_turn or num_left)),
            seed=hash((seed, len(turns))),
        )
        completion = await _completed(engine, request)
        written = np.ones(completion.token_ids.size, np.bool_)
        pieces.append((completion.token_ids, written, completion.log_probs, completion.weight_versions))
        response += completion.token_ids.tolist()
        turns.append(encoder.text(completion.token_ids.tolist()))
        what = f"episode {request_id!r}: step {len(turns)}"
        is_truncated = completion.finish_reason != "stop"
        answering = environment.step(turns[-1], **({"truncated": is_truncated} if takes_truncated else {}))
        reply = await _within(answering, limits.step_timeout_s, what)
        if not math.isfinite(reply.reward):
            raise EpisodeError(f"{what}: the reward is {reply.reward}; expected a finite number")
        score += reply.reward
        if reply.done:
            end = "done"
        elif is_truncated:
            # A turn that was cut off has no end after which a message could come.
            end = "length" if len(response) >= sampling.max_tokens else "truncated_turn"
        elif len(turns) == limits.max_turns:
            end = "max_turns"
        else:
            said = encoder.next(reply.messages, last_token=response[-1])
            if len(response) + len(said) >= sampling.max_tokens:
                end = "length"
            else:
                pieces.append(_of_environment(said))
                response += said
    token_ids, mask, log_probs, versions = (np.concatenate(column) for column in zip(*pieces, strict=True))
    return Episode(
        prompt_ids=np.array(prompt_ids, np.int64),
        token_ids=token_ids,
        response_mask=mask,
        log_probs=log_probs,
        weight_versions=versions,
        turns=tuple(turns),
        score=score,
        end=end,
    )


def _of_environment(token_ids: list[int]) -> _Piece:
    size = len(token_ids)
    return (
        np.array(token_ids, np.int64),
        np.zeros(size, np.bool_),
        np.zeros(size, np.float32),
        np.full(size, -1, np.int32),
    )


async def _completed(engine: Engine, request: Request) -> Completion:
    """Generate a whole turn, through as many requests as it takes."""
    while True:
        [completion] = [c async for c in engine.generate([request])]
        if completion.finish_reason != "abort":
            return completion
        request = dataclasses.replace(request, prefixes=(completion,))


async def _within(answer: Awaitable[T], timeout_s: float, what: str) -> T:
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        raise EpisodeError(f"{what} took longer than {timeout_s} s") from None
    except (Exception, SystemExit) as error:
        raise EpisodeError(f"{what}: {type(error).__name__}: {error}") from error
