"""How well images compress."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.errors import MissingExtraError, RewardConfigError
from gcore_rollout.images.reward import Images

_QUALITY = 95


class JPEGCompressibility:
    """DDPO's rewards (arXiv 2305.13301, section 5.1): kilobytes (1,000 bytes) of a JPEG of quality 95, or less them.

    Args:
        sign: -1: small files are good (compressibility); 1: large ones are (incompressibility).
        size: pixels that a side is resized to before; 0: as it is. Of very small images a file is mostly header.

    Raises:
        MissingExtraError: pillow is not installed.
        RewardConfigError: another sign or a negative size.
    """

    def __init__(self, *, sign: int = -1, size: int = 0) -> None:
        try:
            from PIL import Image
        except ImportError:
            raise MissingExtraError("pillow", "images") from None
        if sign not in (-1, 1):
            raise RewardConfigError(f"sign is {sign}: -1 or 1 is needed")
        if size < 0:
            raise RewardConfigError(f"size is {size}; expected 0 or more")
        self._library = Image
        self._sign = sign
        self._size = size

    def check(self, height: int, width: int) -> None:
        """Any size will do."""

    def __call__(
        self, images: Images, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> NDArray[np.float64]:
        """[B] scores."""
        del prompts, rows
        return np.array([self._sign * self._kilobytes(image) for image in images])

    def _kilobytes(self, image: NDArray[np.uint8]) -> float:
        picture = self._library.fromarray(image)
        if self._size:
            picture = picture.resize((self._size, self._size), self._library.Resampling.BICUBIC)
        file = io.BytesIO()
        picture.save(file, format="JPEG", quality=_QUALITY)
        return file.tell() / 1000
