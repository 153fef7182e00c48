"""Encoded images, such as the contents of PNG and JPEG files: their reading, sizes and pixels."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.errors import RequestError
from gcore_rollout.images.reward import import_pillow

_DAMAGED = (OSError, SyntaxError, ValueError)
"""Errors that Pillow raises for damaged files."""
_ORIENTATION = 0x0112
"""EXIF's tag of how a camera was held."""
_SIDEWAYS = (5, 6, 7, 8)
"""Its values where height and width are exchanged."""
_MAX_16_BIT = 65535


def image_size(image: bytes) -> tuple[int, int]:
    """Return the height and width of an encoded image, as its camera was held; `RequestError` if it is damaged."""
    picture = _open(image)
    width, height = picture.size
    try:
        # A PNG file is decoded for it.
        orientation: object = picture.getexif().get(_ORIENTATION)
    except _DAMAGED as error:
        raise _make_damage_error(image, error) from None
    if orientation in _SIDEWAYS:
        return width, height
    return height, width


def count_pixels(image: bytes) -> int:
    """Return how many pixels an encoded image says that it has, without decoding them."""
    width, height = _open(image).size
    return width * height


def open_rgb(image: bytes) -> Any:
    """Return an image of Pillow in RGB, turned as its camera was held; 16 bits are scaled to 8."""
    picture = _open(image)
    try:
        upright = import_pillow("ImageOps").exif_transpose(picture)
        if upright.mode.startswith("I;16"):
            upright = _scale_to_8_bits(upright)
        if upright.mode in ("I", "F"):
            raise RequestError(
                f"an image of {len(image)} bytes has 32 bits for a pixel of grey; expected 8 or 16"
            )
        return upright.convert("RGB")
    except _DAMAGED as error:
        if isinstance(error, RequestError):
            raise
        raise _make_damage_error(image, error) from None


def read_image(source: bytes | Path | str) -> bytes:
    """Return an encoded image file, from its path or its URL; `OSError` if it cannot be read."""
    if isinstance(source, str):
        import fsspec

        # Untyped: its stubs have a list of files.
        opened: Any = fsspec.open(source, "rb")
        with opened as file:
            return file.read()
    if isinstance(source, bytes):
        return source
    return source.read_bytes()


def decode_image(source: bytes | Path | str) -> NDArray[np.uint8]:
    """Return the pixels [H, W, 3] of an encoded image, its file or its URL.

    `RequestError` if it is none that Pillow reads, `OSError` if it cannot be read.
    """
    return np.asarray(open_rgb(read_image(source)))


def _make_damage_error(image: bytes, error: Exception) -> RequestError:
    return RequestError(f"an image of {len(image)} bytes does not decode: {error}")


def _open(image: bytes) -> Any:
    """Open an image with Pillow, which reads its size and leaves its pixels encoded."""
    pillow = import_pillow()
    try:
        return pillow.open(io.BytesIO(image))
    except (*_DAMAGED, pillow.DecompressionBombError) as error:
        raise RequestError(
            f"an image of {len(image)} bytes is no image file that Pillow reads: {error}"
        ) from None


def _scale_to_8_bits(image: Any) -> Any:
    """Return a grey image of 16 bits in 8; Pillow's own conversion makes all values above 255 white."""
    pixels = np.asarray(image).astype(np.float32)
    scaled = np.rint(pixels * (255 / _MAX_16_BIT))
    return import_pillow().fromarray(scaled.astype(np.uint8))
