"""An engine as a session sees it: tokens in, and tokens with their log-probs and versions out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


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
    ) -> SampledTokens:
        """Continue a prompt of tokens.

        Args:
            session: calls of one session share long prefixes.
            seed: determines the random numbers.
            max_tokens: most tokens of the turn.
            stop: strings that end the turn, which keeps them.
        """
        ...
