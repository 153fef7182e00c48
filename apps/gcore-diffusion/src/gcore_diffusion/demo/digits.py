"""Handwritten digits in colours: the embedded model's training data, and its prompts."""

from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SIZE = 8
"""Pixels of a side."""

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (1.0, 0.2, 0.2),
    "gold": (1.0, 0.85, 0.1),
    "blue": (0.3, 0.45, 1.0),
}

PROMPTS = [f"{colour} {digit}" for colour, digit in product(COLOURS, range(10))]
"""Every prompt of the demo, such as red 7."""


@cache
def load() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return 1,797 grey images of handwritten digits [N, 8, 8] from 0 to 1, and the digits that they show [N].

    They are those of ``sklearn.datasets.load_digits``: the test set of "Optical Recognition of Handwritten Digits"
    (E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, 1998, doi:10.24432/C50P49, CC BY 4.0).
    """
    with np.load(Path(__file__).with_name("digits.npz")) as stored:
        return (stored["images"] / 16).astype(np.float32), stored["labels"].astype(np.int64)
