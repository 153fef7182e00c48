"""Encoded images, such as the contents of PNG and JPEG files."""

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.errors import RequestError
from gcore_rollout.images.reward import import_pillow

_DAMAGED = (OSError, SyntaxError, ValueError)
"""Errors that Pillow raises for damaged files."""


def opened(image: bytes) -> Any:
    """Open an image with Pillow, which reads its size and leaves its pixels encoded."""
    pillow = import_pillow()
    try:
        return pillow.open(io.BytesIO(image))
    except (*_DAMAGED, pillow.DecompressionBombError) as error:
        raise RequestError(f"an image of {len(image)} bytes is no image file that Pillow reads: {error}") from None


def decoded(image: bytes) -> Any:
    """Return an image of Pillow in RGB."""
    found = opened(image)
    try:
        return found.convert("RGB")
    except _DAMAGED as error:
        raise RequestError(f"an image of {len(image)} bytes does not decode: {error}") from None


def decode_image(image: bytes) -> NDArray[np.uint8]:
    """Return the pixels [H, W, 3] of an encoded image; `RequestError` if it is none that Pillow reads."""
    return np.asarray(decoded(image))
