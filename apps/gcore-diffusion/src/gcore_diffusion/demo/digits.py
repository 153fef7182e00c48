"""Handwritten digits in colours, the embedded model's training data, and a reward for its images."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

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
    """Return 1,797 grey images of handwritten digits [N, 8, 8] from 0 to 1, and the digits that they show [N].

    They are those of ``sklearn.datasets.load_digits``: the test set of "Optical Recognition of Handwritten Digits"
    (E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998, doi:10.24432/C50P49, CC BY 4.0).
    """
    stored = _stored()
    return (stored["images"] / 16).astype(np.float32), stored["labels"].astype(np.int64)


@cache
def _stored() -> dict[str, NDArray[Any]]:
    """Return ``digits.npz``: images and labels, and the weight and bias of a classifier of every second image.

    The classifier is ``sklearn.linear_model.LogisticRegression(max_iter=2000)``, fitted to the images from 0 to 1.
    """
    with np.load(Path(__file__).with_name("digits.npz")) as stored:
        return dict(stored)


class DigitReward:
    """Probability that a classifier gives the digit that the prompt names, from 0 to 1.

    It is a logistic regression on half of the digits. `accuracy` is by another kind of classifier on the other half,
    the nearest of its images, so that a policy which exploits the first is noticed.
    """

    def __init__(self) -> None:
        images, labels = load()
        self._weight, self._bias = (_stored()[name] for name in ("weight", "bias"))
        self._known = images[1::2].reshape(-1, SIZE * SIZE).astype(np.float64)
        self._known_labels = labels[1::2]

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
        logits = _brightness(images) @ self._weight.T + self._bias
        odds = np.exp(logits - logits.max(1, keepdims=True))
        return (odds / odds.sum(1, keepdims=True))[np.arange(len(wanted)), wanted]

    def accuracy(self, images: NDArray[np.uint8], prompts: Sequence[str]) -> NDArray[np.bool_]:
        """Return [B] whether the other classifier reads the prompts' digits."""
        # Squared distances, without the images' own norms, which are the same for every neighbour.
        distances = (self._known**2).sum(1) - 2 * _brightness(images) @ self._known.T
        return self._known_labels[distances.argmin(1)] == np.array([_digit_of(prompt) for prompt in prompts])


def _digit_of(prompt: str) -> int:
    """Return the digit that a prompt names; `RewardConfigError` if it names none."""
    for word in prompt.split():
        if len(word) == 1 and word.isdecimal():
            return int(word)
    raise RewardConfigError(f"prompt is {prompt!r}; expected one that names a digit, such as 'red 7'")


def _brightness(images: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the brightest channel [B, 64], from 0 to 1."""
    return images.max(-1).reshape(len(images), -1) / 255
