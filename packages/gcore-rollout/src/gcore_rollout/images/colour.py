"""How much of an image has the colour that its prompt names."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.errors import RewardConfigError
from gcore_rollout.images.reward import Images


class ColourReward:
    """Cosine similarity, from 0 to 1, of an image's mean colour, its bright pixels weighing more, and the prompt's.

    Args:
        colours: by the word of a prompt that names them; each red, green and blue from 0 to 1.

    Raises:
        RewardConfigError: a colour is none, or there are none.
    """

    def __init__(self, colours: Mapping[str, tuple[float, float, float]]) -> None:
        if not colours:
            raise RewardConfigError("colours is empty: a colour at least is needed")
        for word, colour in colours.items():
            if len(colour) != 3 or not all(0 <= part <= 1 for part in colour) or not any(colour):
                raise RewardConfigError(
                    f"colours has {word!r}: {colour}: three numbers from 0 to 1, one above 0, are needed"
                )
        self._colours = {word: np.asarray(c, np.float64) / np.linalg.norm(c) for word, c in colours.items()}

    def check(self, height: int, width: int) -> None:
        """Any size will do."""

    def __call__(
        self, images: Images, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> NDArray[np.float64]:
        """[B] scores.

        Raises:
            RewardConfigError: a prompt names no known colour.
        """
        del rows
        wanted = np.stack([self._wanted(prompt) for prompt in prompts])
        return (mean_colours(images) * wanted).sum(1)

    def _wanted(self, prompt: str) -> NDArray[np.float64]:
        for word in prompt.split():
            if word in self._colours:
                return self._colours[word]
        raise RewardConfigError(f"prompt {prompt!r} names no colour; expected one of {', '.join(self._colours)}")


def mean_colours(images: Images) -> NDArray[np.float64]:
    """[B, 3] unit vectors of the mean colour of each image, pixels weighed by their brightest channel."""
    pixels = images.astype(np.float64) / 255
    means = (pixels * pixels.max(-1, keepdims=True)).sum((1, 2))
    return means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
