"""An engine as a session sees it: tokens in, tokens with their log-probs and versions out; and the time that counts."""

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class SampledTokens:
    """The tokens of one turn; all lists have their length.

    Example:
        >>> turn = SampledTokens(token_ids=[5, 1], log_probs=[-0.5, -0.1], weight_versions=[3, 3], finish_reason="stop")
        >>> turn.finish_reason
        'stop'
    """

    token_ids: list[int]
    """With the token that ends the turn, if it has ended."""
    log_probs: list[float]
    """log p(token) under the distribution that it was drawn from."""
    weight_versions: list[int]
    """Version of the weights that made each token."""
    finish_reason: Literal["stop", "length", "repetition"]
    """Its end was sampled, or a stop string; it was cut off at its most tokens, or for repeating itself."""
    routed_experts: NDArray[np.int16] | None = None
    """[P + T - 1, L, K] the experts that prompt and turn, without its last token, passed through in the L layers of a
    mixture of experts; None: unknown."""


class TokenSampler(Protocol):
    """An engine as a session sees it. Temperature and the like are its own: agents do not choose them.

    Example:
        >>> class Echo:
        ...     async def sample(self, prompt_ids, *, session, seed, max_tokens, stop=()):
        ...         tokens = list(prompt_ids[-max_tokens:])
        ...         numbers = {"log_probs": [0.0] * len(tokens), "weight_versions": [0] * len(tokens)}
        ...         return SampledTokens(token_ids=tokens, finish_reason="stop", **numbers)
        >>> import asyncio
        >>> asyncio.run(Echo().sample([4, 5], session="a", seed=0, max_tokens=1)).token_ids
        [5]
    """

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        session: str,
        seed: int,
        max_tokens: int,
        stop: Sequence[str] = (),
        images: Sequence[bytes] = (),
        image_starts: Sequence[int] = (),
    ) -> SampledTokens:
        """Continue a prompt of tokens.

        Args:
            session: calls of one session share long prefixes.
            seed: determines the random numbers.
            max_tokens: most tokens of the turn.
            stop: strings that end the turn, which keeps them.
            images: the image files of the prompt; both are given only if there are any.
            image_starts: the first token of each image; other image tokens are text that the policy wrote.
        """
        ...


class SessionClock:
    """The seconds that count for a session, from its start: none do while an engine holds its turns back.

    Example:
        >>> clock = SessionClock()
        >>> with clock.stopped():
        ...     time.sleep(0.2)
        >>> clock.now_s() < 0.2
        True
    """

    def __init__(self) -> None:
        self._num_stops = 0
        self._stop_s = 0.0
        self._uncounted_s = time.monotonic()
        self._limits: dict[asyncio.Timeout, float] = {}

    def now_s(self) -> float:
        """Return the seconds that count until now."""
        now_s = self._stop_s if self._num_stops else time.monotonic()
        return now_s - self._uncounted_s

    @contextmanager
    def stopped(self) -> Generator[None]:
        """Stop the clock inside the block, and all of its limits; blocks may overlap."""
        if not self._num_stops:
            self._stop_s = time.monotonic()
        self._num_stops += 1
        self._reschedule()
        try:
            yield
        finally:
            self._num_stops -= 1
            if not self._num_stops:
                self._uncounted_s += time.monotonic() - self._stop_s
            self._reschedule()

    @asynccontextmanager
    async def limit(self, timeout_s: float) -> AsyncGenerator[None]:
        """Raise `TimeoutError` when the block has taken so many seconds of this clock, as `asyncio.timeout` does."""
        async with asyncio.timeout(None) as limit:
            self._limits[limit] = self.now_s() + timeout_s
            self._reschedule()
            try:
                yield
            finally:
                del self._limits[limit]

    def _reschedule(self) -> None:
        now_s = self.now_s()
        for limit, end_s in self._limits.items():
            if limit.expired():
                continue
            when_s = None
            if not self._num_stops:
                when_s = asyncio.get_running_loop().time() + end_s - now_s
            limit.reschedule(when_s)
