"""Rewards of the embedded model's images: one to train on, and a judge of another kind that is only measured."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_diffusion.demo.digits import COLOURS, PROMPTS, SIZE, load
from gcore_rollout import RewardConfigError

_NO_DIGIT = len(PROMPTS)
"""Class of images that show no digit, or one in another colour; the others are the indices in `PROMPTS`."""
_RGB = np.array(list(COLOURS.values()), np.float32)
_NUM_KNOWN = 6000
_WIDTH = 64
_STEPS = 400
_BATCH_SIZE = 128
_LR = 3e-3
_LEAST_FILLED = 3.0
"""Pixels that the holes of a digit have at least, to be one that is spoiled by filling them."""


class _PromptReward:
    """A reward of images of the digits' size, by the digit and the colour that their prompts name."""

    def check(self, height: int, width: int) -> None:
        """Raise `RewardConfigError` if the images are not of the digits' size."""
        if (height, width) != (SIZE, SIZE):
            raise RewardConfigError(
                f"rewards of digits score {SIZE} x {SIZE} pixels; these images have {height} x {width}"
            )


class DigitReward(_PromptReward):
    """Share of the known images near an image, from 0 to 1, that show its prompt's digit in the prompt's colour.

    A known image counts e^(-d^2 / width), with d its distance. Known are every second digit, in colours, and images of
    no digit that a classifier which knows digits alone takes for one; see `_batch`.
    """

    def __init__(self, *, width: float = 0.5) -> None:
        images, labels = load()
        self._known, self._classes = _batch(
            images[::2], labels[::2], np.random.default_rng(0), _NUM_KNOWN
        )
        self._width = width

    def __call__(
        self, images: NDArray[np.uint8], prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> NDArray[np.float64]:
        """Return the shares [B]."""
        del rows
        # Squared distances, without the images' own norms, which are the same for every neighbour.
        pixels = images.reshape(len(images), -1).astype(np.float32) / 255
        distances = (self._known**2).sum(1) - 2 * pixels @ self._known.T
        counts = np.exp(
            (distances.min(1, keepdims=True) - distances).astype(np.float64) / self._width
        )
        return (counts * (self._classes == _classes(prompts)[:, None])).sum(1) / counts.sum(1)


class DemoJudgeReward(_PromptReward):
    """Probability that an image shows its prompt's digit in its colour, from 0 to 1: the least by four classifiers.

    They are of another kind than `DigitReward`, networks with one hidden layer, and of other digits: where that rises
    and this falls, it is exploited. They are trained when this is made, in a second or two.
    """

    def __init__(self, *, num_classifiers: int = 4) -> None:
        generator = torch.Generator().manual_seed(0)
        rng = np.random.default_rng(0)
        parameters: list[torch.Tensor] = []
        for num_inputs, num_outputs in ((SIZE * SIZE * 3, _WIDTH), (_WIDTH, _NO_DIGIT + 1)):
            weight = torch.randn(num_classifiers, num_inputs, num_outputs, generator=generator)
            weight *= (2 / num_inputs) ** 0.5
            parameters.append(weight.requires_grad_())
            parameters.append(torch.zeros(num_classifiers, 1, num_outputs, requires_grad=True))
        self._parameters = parameters
        optimizer = torch.optim.AdamW(parameters, lr=_LR, weight_decay=0.01)
        images, labels = load()
        with torch.enable_grad():
            for step in range(_STEPS):
                pixels, classes = _batch(
                    images[1::2], labels[1::2], rng, num_classifiers * _BATCH_SIZE
                )
                logits = self._logits(
                    torch.from_numpy(pixels).view(num_classifiers, _BATCH_SIZE, -1)
                )
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), torch.from_numpy(classes)
                )
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.param_groups[0]["lr"] = _LR * (1 - step / _STEPS)
                optimizer.step()
        for parameter in parameters:
            parameter.requires_grad_(False)

    def __call__(
        self, images: NDArray[np.uint8], prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> NDArray[np.float64]:
        """Return the least probabilities [B]."""
        del rows
        pixels = torch.from_numpy(images.reshape(len(images), -1).astype(np.float32) / 255)
        probabilities = self._logits(pixels).softmax(-1)[
            :, np.arange(len(images)), _classes(prompts)
        ]
        return probabilities.min(0).values.double().numpy()

    def _logits(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the logits [K, B, classes] of pixels [B, ...], or [K, B, ...] with a batch for each classifier."""
        hidden, hidden_bias, output, output_bias = self._parameters
        return (pixels @ hidden + hidden_bias).relu() @ output + output_bias


def _classes(prompts: Sequence[str]) -> NDArray[np.int64]:
    """Return the indices [B] in `PROMPTS` of the colour and the digit that each prompt names."""
    classes: list[int] = []
    for prompt in prompts:
        words = set(prompt.split())
        matches = [index for index, name in enumerate(PROMPTS) if words.issuperset(name.split())]
        if not matches:
            raise RewardConfigError(
                f"prompt is {prompt!r}; expected one that names a colour and a digit: 'red 7'"
            )
        classes.append(matches[0])
    return np.array(classes)


def _shift_images(images: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return images [N, 8, 8] as they are and moved by a pixel in each direction, [5, N, 8, 8]."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)), mode="edge")
    return np.stack(
        [padded[:, y : y + SIZE, x : x + SIZE] for y, x in ((1, 1), (0, 1), (2, 1), (1, 0), (1, 2))]
    )


def _batch(
    images: NDArray[np.float32], labels: NDArray[np.int64], rng: np.random.Generator, count: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Draw pixels [N, 192] from 0 to 1, and their classes [N].

    Half of the images are of no digit, but as a policy may draw them that exploits a classifier: halves of two digits,
    three images of a digit on average, digits without their middle, swollen, with their holes filled, speckled, or in
    other colours.
    """
    first, second = rng.integers(len(images), size=(2, count))
    colour = rng.integers(len(_RGB), size=count)
    variant = rng.integers(14, size=count)
    grey = images[first]
    digits = labels[first]
    order = np.argsort(labels, kind="stable")
    sizes = np.bincount(labels)
    starts = (sizes.cumsum() - sizes)[digits]
    same_digit = images[order[starts + rng.integers(sizes[digits], size=(3, count))]]
    is_vertical = rng.random((count, 1, 1)) < 0.5
    rows = np.arange(SIZE)

    def across(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return np.where(is_vertical, mask[..., None, :], mask[..., :, None])

    start = rng.integers(2, 4, size=(count, 1))
    swollen = _shift_images(grey).max(0)
    filled = _shift_images(swollen).min(0)
    spoiled = [
        np.where(across(rows < SIZE // 2), grey, images[second]),
        same_digit.mean(0),
        np.where(across((rows >= start) & (rows < start + 3)), 0, grey),
        swollen,
        filled,
        grey * rng.uniform(0.2, 1.0, grey.shape),
    ]
    is_spoiled = variant == np.arange(len(spoiled))[:, None]
    is_spoiled[0] &= digits != labels[second]
    is_spoiled[4] &= (filled - grey).sum((1, 2)) > _LEAST_FILLED
    pixels = np.select(list(is_spoiled[:, :, None, None]), spoiled, grey)
    random_rgb = rng.random((count, 3))
    directions = random_rgb / np.linalg.norm(random_rgb, axis=1, keepdims=True)
    known_directions = _RGB / np.linalg.norm(_RGB, axis=1, keepdims=True)
    is_strange = (directions @ known_directions.T).max(1) < 0.93
    is_strange &= variant == len(spoiled)
    rgb = np.where(is_strange[:, None], random_rgb / random_rgb.max(1, keepdims=True), _RGB[colour])
    pixels = pixels[..., None] * rgb[:, None, None] * rng.uniform(0.75, 1.0, (count, 1, 1, 1))
    noised = (pixels + rng.normal(0, 0.05, pixels.shape)).clip(0, 1)
    classes = np.where(is_spoiled.any(0) | is_strange, _NO_DIGIT, colour * 10 + digits)
    return noised.reshape(count, -1).astype(np.float32), classes
