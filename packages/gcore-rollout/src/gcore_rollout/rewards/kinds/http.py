"""Rewards of completions and of images from a server of the user's, by JSON over HTTP."""

import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any, cast
from urllib.parse import urljoin, urlsplit

from gcore_rollout.errors import RewardError, make_extra_error, require
from gcore_rollout.images.reward import Images, Rows, import_pillow, png
from gcore_rollout.rewards.reward import Scored
from gcore_rollout.rewards.runner import RetryPolicy, check_score

_MAX_ANSWER_BYTES = 16 << 20
_MAX_REDIRECTS = 3
_LONGEST_ERROR_TEXT = 500
"""Characters of a server's answer that an error shows."""


@dataclass(eq=False)
class JSONServer:
    """Posts JSON to a server and returns its JSON.

    A status of 5xx or 429, a connection that fails and a time-out are tried again as ``retry`` says; any other status
    than 200 is an error at once, with the server's text, and so is an answer of more than 16 MiB. Up to three redirects
    of status 307 or 308 are followed if they keep the scheme, host and port as written. `RolloutError` if aiohttp is
    not installed.
    """

    url: str
    """http or https."""
    _: KW_ONLY
    timeout_s: float = 30.0
    """Time limit of each request, from connecting to the last byte; a redirect begins another."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    max_connections: int = 64
    """Largest number of open connections; further calls wait, and their time-out does not run yet."""
    headers: Mapping[str, str] | None = None
    """Sent with every request, such as an authorization."""

    def __post_init__(self) -> None:
        if find_spec("aiohttp") is None:
            raise make_extra_error("aiohttp", "http")
        require(
            "url",
            self.url,
            self.url.startswith(("http://", "https://")),
            "http://... or https://...",
        )
        require("timeout_s", self.timeout_s, self.timeout_s > 0, "more than 0")
        require("max_connections", self.max_connections, self.max_connections >= 1, "at least 1")
        self._connections = asyncio.Semaphore(self.max_connections)
        self._session: Any = None

    async def post(self, message: Mapping[str, Any], *, expected: str) -> Mapping[str, Any]:
        """Send a message, and return the answer, an object with a field ``expected``; `RewardError` otherwise."""
        try:
            body = json.dumps(message, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise RewardError(f"the row cannot be sent as JSON: {error}") from None
        try:
            text = await self.retry.run(partial(self._post, body))
        except ConnectionError as error:
            attempts = self.retry.max_retries + 1
            reason = str(error)
            if attempts > 1:
                reason += f", in each of {attempts} attempts"
            # Without its cause, for which a runner around this would try again.
            raise RewardError(reason) from None
        try:
            answer = json.loads(text)
        except json.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict) or expected not in answer:
            raise self._answer_error(text, f"JSON with {expected!r}")
        return cast(dict[str, Any], answer)

    def _answer_error(self, answer: str, expected: str) -> RewardError:
        """Return the error of an answer that is not as expected."""
        return RewardError(
            f"{self.url} answered {answer[:_LONGEST_ERROR_TEXT]!r}; expected {expected}"
        )

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(self, body: bytes) -> str:
        """Return the answer's text; `ConnectionError` if another attempt may succeed."""
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={**(self.headers or {}), "Content-Type": "application/json"},
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=self.timeout_s),
            )
        try:
            async with self._connections:
                answer, text = await self._follow(self.url, body)
        except TimeoutError:
            raise ConnectionError(
                f"{self.url} did not answer within timeout_s={self.timeout_s}"
            ) from None
        except aiohttp.ClientError as error:
            raise ConnectionError(f"{self.url}: {type(error).__name__}: {error}") from None
        if answer.status != 200:
            message = f"{self.url} answered {answer.status} {answer.reason}: {text[:_LONGEST_ERROR_TEXT]!r}"
            if answer.status >= 500 or answer.status == 429:
                raise ConnectionError(message)
            raise RewardError(message)
        return text

    async def _follow(self, url: str, body: bytes) -> tuple[Any, str]:
        """Post to a URL, and to those that it redirects to on the same host; return the answer and its text."""
        for _ in range(_MAX_REDIRECTS + 1):
            async with self._session.post(url, data=body, allow_redirects=False) as answer:
                text = (await self._read(answer)).decode(errors="replace")
            if answer.status not in (307, 308):
                return answer, text
            target = urljoin(url, answer.headers.get("Location", ""))
            if urlsplit(target)[:2] != urlsplit(self.url)[:2]:
                # The rows, and headers such as an authorization, are not for another host.
                raise RewardError(
                    f"{self.url} redirects to {target!r:.200}; expected the URL that answers"
                )
            url = target
        raise RewardError(
            f"{self.url} redirects more than {_MAX_REDIRECTS} times; expected the URL that answers"
        )

    async def _read(self, answer: Any) -> bytes:
        """Read the body of an answer, up to a bound."""
        read = bytearray()
        async for part in answer.content.iter_chunked(1 << 16):
            read += part
            if len(read) > _MAX_ANSWER_BYTES:
                raise RewardError(
                    f"{self.url} answers more than {_MAX_ANSWER_BYTES >> 20} MB; expected a few numbers"
                )
        return bytes(read)


class HTTPReward(JSONServer):
    """Posts each completion to a server and returns its score.

    Request: ``POST url``, JSON ``{"prompt": str, "completion": str, "row": {...}}``. Answer: status 200, JSON
    ``{"score": number}``, and optionally ``"parts": {name: number}`` and ``"feedback": str``. See `JSONServer` for
    retries; a `RewardRunner` around this does not retry again.

    Example:
        >>> def answer(message):  # what the server does with a request's JSON
        ...     return {"score": float(message["completion"] == message["row"]["answer"])}
        >>> class LocalReward(HTTPReward):  # in place of a server
        ...     async def post(self, message, *, expected):
        ...         return answer(message)
        >>> reward = LocalReward("http://localhost:8000/score", timeout_s=10.0)
        >>> asyncio.run(reward("1 + 1 =", "2", {"answer": "2"}))
        Scored(score=1.0, parts={}, feedback='', answer=None)
    """

    async def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> Scored:
        """Score one completion; `RewardError` as `JSONServer.post`, or if the answer has no finite score."""
        answer = await self.post(
            {"prompt": prompt, "completion": completion, "row": dict(row)}, expected="score"
        )
        parts = answer.get("parts", {})
        feedback = answer.get("feedback", "")
        if not isinstance(parts, dict) or not isinstance(feedback, str):
            raise self._answer_error(
                json.dumps(answer), '"parts" to be an object and "feedback" a string'
            )
        return check_score(
            Scored(score=answer["score"], parts=cast(dict[str, float], parts), feedback=feedback)
        )


class HTTPImageReward(JSONServer):
    """Posts a batch of images and returns their scores; Pillow encodes them.

    Request: ``POST url``, JSON ``{"images": [PNG in base64, ...], "prompts": [str, ...], "rows": [{...}, ...]}``.
    Answer: status 200, JSON ``{"scores": [number, ...]}``. Nothing is tried again.
    """

    def __init__(self, url: str, *, timeout_s: float = 60.0) -> None:
        import_pillow()
        super().__init__(url, timeout_s=timeout_s, retry=RetryPolicy(max_retries=0))

    async def __call__(self, images: Images, prompts: Sequence[str], rows: Rows) -> list[float]:
        """Return scores [B]; `RewardError` as `JSONServer.post`."""
        encoded = [base64.b64encode(png(image)).decode() for image in images]
        message = {"images": encoded, "prompts": list(prompts), "rows": [dict(row) for row in rows]}
        try:
            answer = await self.post(message, expected="scores")
        finally:
            await self.close()
        try:
            return [float(score) for score in answer["scores"]]
        except (ValueError, TypeError):
            raise self._answer_error(json.dumps(answer), 'JSON {"scores": [number, ...]}') from None
