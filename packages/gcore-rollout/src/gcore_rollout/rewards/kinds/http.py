"""Rewards from a server of the user's."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, cast

from gcore_rollout.errors import MissingExtraError, RewardConfigError, RewardError
from gcore_rollout.rewards.retry import RetryPolicy
from gcore_rollout.rewards.reward import Scored, checked

LONGEST_ERROR_TEXT = 500
"""Characters of a server's answer that an error shows."""


class _MayPassError(Exception):
    """Another attempt may succeed."""


class HTTPReward:
    """Posts each completion to a server and returns its score.

    Request: ``POST url``, JSON ``{"prompt": str, "completion": str, "row": {...}}``. Answer: status 200, JSON
    ``{"score": number}``, and if wanted ``"parts": {name: number}`` and ``"feedback": str``. A status of 5xx or 429, a
    connection that fails and a time-out are tried again; any other status is an error at once, with the server's text.

    Args:
        url: http or https.
        timeout_s: of each attempt, from connecting to the last byte.
        retry: how often; a `RewardRunner` around this does not retry what failed here.
        max_connections: open at one time; further calls wait for one, and their time-out does not run yet.
        headers: sent with every request, such as an authorization.

    Raises:
        MissingExtraError: aiohttp is not installed.
        RewardConfigError: a bad setting.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 30.0,
        retry: RetryPolicy | None = None,
        max_connections: int = 64,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        try:
            import aiohttp
        except ImportError as error:
            raise MissingExtraError("aiohttp", "http") from error
        if not url.startswith(("http://", "https://")):
            raise RewardConfigError(f"url is {url!r}; expected http://... or https://...")
        if not timeout_s > 0:
            raise RewardConfigError(f"timeout_s is {timeout_s}; expected more than 0")
        if max_connections < 1:
            raise RewardConfigError(f"max_connections is {max_connections}; expected at least 1")
        self._library = aiohttp
        self._url = url
        self._timeout_s = timeout_s
        self._retry = retry or RetryPolicy()
        self._places = asyncio.Semaphore(max_connections)
        self._headers = dict(headers or {})
        self._session: Any = None

    async def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> Scored:
        """
        Raises:
            RewardError: the server refused, answered with something else, or did not answer in any attempt.
        """
        try:
            body = json.dumps({"prompt": prompt, "completion": completion, "row": dict(row)}, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise RewardError(f"the row cannot be sent as JSON: {error}") from None
        try:
            return await self._retry.run(
                lambda: self._post(body), may_pass=lambda error: isinstance(error, _MayPassError)
            )
        except _MayPassError as error:
            # Without its cause, which a runner around this would take for a reason to begin again.
            raise RewardError(f"{error}, in each of {self._retry.max_retries + 1} attempts") from None

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(self, body: bytes) -> Scored:
        http = self._library
        if self._session is None:
            self._session = http.ClientSession(
                headers=self._headers | {"Content-Type": "application/json"},
                connector=http.TCPConnector(limit=0),
                timeout=http.ClientTimeout(total=self._timeout_s),
            )
        try:
            async with self._places, self._session.post(self._url, data=body) as answer:
                text = (await answer.read()).decode(errors="replace")
        except TimeoutError:
            raise _MayPassError(f"{self._url} did not answer within timeout_s={self._timeout_s}") from None
        except http.ClientError as error:
            raise _MayPassError(f"{self._url}: {type(error).__name__}: {error}") from None
        if answer.status != 200:
            said = f"{self._url} answered {answer.status} {answer.reason}: {text[:LONGEST_ERROR_TEXT]!r}"
            raise (_MayPassError if answer.status >= 500 or answer.status == 429 else RewardError)(said)
        return self._read(text)

    def _read(self, text: str) -> Scored:
        try:
            answer = json.loads(text)
        except json.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict) or "score" not in answer:
            raise RewardError(f'{self._url} answered {text[:LONGEST_ERROR_TEXT]!r}: JSON {{"score": number}} is needed')
        fields = cast(dict[str, Any], answer)
        parts, feedback = fields.get("parts", {}), fields.get("feedback", "")
        if not isinstance(parts, dict) or not isinstance(feedback, str):
            raise RewardError(
                f'{self._url} answered {text[:LONGEST_ERROR_TEXT]!r}: "parts" is an object and "feedback" a string'
            )
        return checked(Scored(score=fields["score"], parts=cast(dict[str, float], parts), feedback=feedback))
