"""scikit-learn's digits in colours, the embedded model's training data, and a reward for its images."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gcore_rollout import RewardConfigError

SIZE = 8
"""Pixels of a side."""

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (1.0, 0.2, 0.2),
    "gold": (1.0, 0.85, 0.1),
    "blue": (0.3, 0.45, 1.0),
}

PROMPTS = [f"{colour} {digit}" for colour in COLOURS for digit in range(10)]
"""Every prompt of the demo, such as red 7."""


@cache
def load() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return scikit-learn's 1,797 grey images [N, 8, 8] from 0 to 1, and the digits that they show [N]."""
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    return (found.images / 16).astype(np.float32), found.target.astype(np.int64)


class DigitReward:
    """Probability that a classifier gives the digit that the prompt names, from 0 to 1.

    It is a logistic regression on half of the digits. `accuracy` is by another kind of classifier on the other half, so
    that a policy which exploits the first is noticed.
    """

    def __init__(self) -> None:
        from sklearn.linear_model import LogisticRegression
        from sklearn.svm import SVC

        images, labels = load()
        pixels = images.reshape(len(images), -1)
        makes: list[Any] = [LogisticRegression(max_iter=2000), SVC(gamma=cast(Any, 0.02))]
        self._trained, self._held_out = (make.fit(pixels[i::2], labels[i::2]) for i, make in enumerate(makes))

    def check(self, height: int, width: int) -> None:
        """Raise `RewardConfigError` if the images are not of the digits' size."""
        if (height, width) != (SIZE, SIZE):
            raise RewardConfigError(f"reward digit scores {SIZE} x {SIZE} pixels: these images have {height} x {width}")

    def __call__(
        self, images: NDArray[np.uint8], prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> NDArray[np.float64]:
        """Return probabilities [B] of the prompts' digits."""
        del rows
        wanted = np.array([_digit_of(prompt) for prompt in prompts])
        return self._trained.predict_proba(_brightness(images))[np.arange(len(wanted)), wanted]

    def accuracy(self, images: NDArray[np.uint8], prompts: Sequence[str]) -> NDArray[np.bool_]:
        """Return [B] whether the other classifier reads the prompts' digits."""
        return self._held_out.predict(_brightness(images)) == np.array([_digit_of(prompt) for prompt in prompts])


def _digit_of(prompt: str) -> int:
    """Return the digit that a prompt names; `RewardConfigError` if it names none."""
    for word in prompt.split():
        if len(word) == 1 and word.isdecimal():
            return int(word)
    raise RewardConfigError(f"prompt is {prompt!r}; expected one that names a digit, such as 'red 7'")


def _brightness(images: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the brightest channel [B, 64], from 0 to 1."""
    return images.max(-1).reshape(len(images), -1) / 255
