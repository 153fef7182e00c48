"""Rewards of images from a server of the user's."""

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

from gcore_rollout.errors import MissingExtraError
from gcore_rollout.images.reward import Images
from gcore_rollout.rewards.kinds.http import JSONServer
from gcore_rollout.rewards.retry import RetryPolicy


class HTTPImageReward:
    """Posts a batch of images and returns their scores.

    Request: ``POST url``, JSON ``{"images": [PNG in base64, ...], "prompts": [str, ...], "rows": [{...}, ...]}``.
    Answer: status 200, JSON ``{"scores": [number, ...]}``. Nothing is tried again.

    Args:
        url: http or https.
        timeout_s: of a request.

    Raises:
        MissingExtraError: aiohttp or pillow is not installed.
        RewardConfigError: a setting is out of its range.
    """

    def __init__(self, url: str, *, timeout_s: float = 60.0) -> None:
        try:
            import PIL  # noqa: F401  # pyright: ignore[reportUnusedImport]
        except ImportError:
            raise MissingExtraError("PIL", "images") from None
        self._server = JSONServer(url, timeout_s=timeout_s, retry=RetryPolicy(max_retries=0))

    async def __call__(self, images: Images, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return scores [B].

        Raises:
            RewardError: the server refused, answered with something else, or not in time.
        """
        encoded = [base64.b64encode(png(image)).decode() for image in images]
        message = {"images": encoded, "prompts": list(prompts), "rows": [dict(row) for row in rows]}
        try:
            answer = await self._server.post(message, expected="scores")
        finally:
            await self._server.close()
        try:
            return [float(score) for score in answer["scores"]]
        except (ValueError, TypeError):
            raise self._server.unexpected(answer, 'JSON {"scores": [number, ...]}') from None


def png(image: Any) -> bytes:
    """Encode an image [H, W, 3] of uint8 as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG")
    return file.getvalue()
