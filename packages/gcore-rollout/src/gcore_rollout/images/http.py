"""Rewards of images from a server of the user's."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from gcore_rollout.errors import MissingExtraError, RewardConfigError, RewardError
from gcore_rollout.images.reward import Images

_LONGEST_ERROR_TEXT = 500


class HTTPImageReward:
    """Posts a batch of images and returns their scores.

    Request: ``POST url``, JSON ``{"images": [PNG in base64, ...], "prompts": [str, ...], "rows": [{...}, ...]}``.
    Answer: status 200, JSON ``{"scores": [number, ...]}``.

    Args:
        url: http or https.
        timeout_s: of a request.

    Raises:
        MissingExtraError: aiohttp or pillow is not installed.
        RewardConfigError: a bad setting.
    """

    def __init__(self, url: str, *, timeout_s: float = 60.0) -> None:
        for module, extra in (("aiohttp", "http"), ("PIL", "images")):
            try:
                __import__(module)
            except ImportError:
                raise MissingExtraError(module, extra) from None
        if not url.startswith(("http://", "https://")):
            raise RewardConfigError(f"url is {url!r}; expected http://... or https://...")
        if not timeout_s > 0:
            raise RewardConfigError(f"timeout_s is {timeout_s}; expected more than 0")
        self._url = url
        self._timeout_s = timeout_s

    def check(self, height: int, width: int) -> None:
        """The server says what it cannot score."""

    async def __call__(self, images: Images, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """[B] scores.

        Raises:
            RewardError: the server refused, answered with something else, or not in time.
        """
        import aiohttp

        encoded = [base64.b64encode(png(image)).decode() for image in images]
        body = {"images": encoded, "prompts": list(prompts), "rows": [dict(row) for row in rows]}
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, session.post(self._url, json=body) as answer:
                text = await answer.text(errors="replace")
        except TimeoutError:
            raise RewardError(f"{self._url} did not answer within timeout_s={self._timeout_s}") from None
        except aiohttp.ClientError as error:
            raise RewardError(f"{self._url}: {type(error).__name__}: {error}") from None
        if answer.status != 200:
            raise RewardError(f"{self._url} answered {answer.status} {answer.reason}: {text[:_LONGEST_ERROR_TEXT]!r}")
        try:
            return [float(score) for score in json.loads(text)["scores"]]
        except (ValueError, KeyError, TypeError):
            raise RewardError(
                f'{self._url} answered {text[:_LONGEST_ERROR_TEXT]!r}: JSON {{"scores": [number, ...]}} is needed'
            ) from None


def png(image: Any) -> bytes:
    """An image [H, W, 3] of uint8 as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG")
    return file.getvalue()
