"""The interface of a tracker."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

Images = Mapping[str, NDArray[np.uint8]]
"""Images [H, W, 3], by name."""


class Tracker(AbstractContextManager[Any], ABC):
    """Gets every metric of a run, until it is closed."""

    @abstractmethod
    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show some metrics of a step."""

    def write_images(self, step: int, images: Images) -> None:
        """Show images of a step, where the tracker can."""
        del step, images
