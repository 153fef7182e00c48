"""Rewards of images: their evaluation, and those of pixels alone."""

import inspect
import io
import math
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.errors import RewardConfigError, RewardError, make_extra_error, require
from gcore_rollout.rewards.reward import Scored, ThreadedReward, locate_errors, name_of
from gcore_rollout.rewards.runner import answer, is_async

Images = NDArray[np.uint8]
"""Images [B, H, W, 3]."""
Rows = Sequence[Mapping[str, Any]]
"""The data set's rows [B]."""
Scores = NDArray[np.float64]
"""Scores [B]."""

ImageRewardFunction = Callable[[Images, Sequence[str], Rows], Any | Awaitable[Any]]
"""``reward(images, prompts, rows)`` returns B scores, or B scores and a dict of more numbers by name, each B or one for
all, which become metrics. It may be async. Methods ``check(height, width)`` and ``check_prompts(prompts, rows)``, if
there are any, raise `RewardConfigError` before a run for images of a size, or for prompts, that it cannot score. A true
``uses_engine`` says that an engine, which times its own work, computes it."""

ScoreImages = Callable[[Images, Sequence[str], Rows], Scores]
"""An `ImageRewardFunction` that returns scores alone, and is not async."""

_QUALITY = 95


async def evaluate_images(
    reward: ImageRewardFunction, images: Images, prompts: Sequence[str], rows: Rows
) -> list[Scored]:
    """Call a reward, in a thread unless it is async, and check what it returns.

    Scores may be in a tensor of torch, of any data type and device and with a gradient. Of the numbers that may come
    with them, those that are one for every image, or one for all, are the parts of each score; the rest is left out.
    `RewardError` if it raised, or did not return as many finite numbers as there are images; `RewardExitError` if it
    tried to end the process.
    """
    # A daemon thread: one of asyncio would keep the process from ending while the reward blocks.
    threaded = None if is_async(reward) else ThreadedReward(reward, max_workers=1)
    with locate_errors(f"reward {name_of(reward)!r} on {len(images)} images"):
        try:
            values = await answer(threaded or reward, images, prompts, rows)
        finally:
            if threaded is not None:
                threaded.close()
        scores, parts = _read(values, len(images), "images")
        scored: list[Scored] = []
        for i, (score, prompt) in enumerate(zip(scores, prompts, strict=True)):
            if not math.isfinite(score):
                raise RewardError(
                    f"returned {score} for an image of {prompt!r}; expected a finite number"
                )
            scored.append(
                Scored(score=score, parts={name: values[i] for name, values in parts.items()})
            )
        return scored


def check_images(rewards: Iterable[ImageRewardFunction], height: int, width: int) -> None:
    """Raise `RewardConfigError` for images of a size that one of the rewards cannot score."""
    for reward in rewards:
        check: Callable[[int, int], None] | None = getattr(reward, "check", None)
        if check:
            check(height, width)


def check_prompts(
    rewards: Iterable[ImageRewardFunction], prompts: Sequence[str], rows: Rows
) -> None:
    """Raise `RewardConfigError` for prompts that one of the rewards cannot score."""
    for reward in rewards:
        check: Callable[[Sequence[str], Rows], None] | None = getattr(reward, "check_prompts", None)
        if check:
            check(prompts, rows)


class FrameReward:
    """Scores videos by a reward of images: the mean over frames in the middles of ``num_frames`` equal parts.

    The numbers that come with scores are means over the frames, too. Images are scored as they are. With
    ``one_at_a_time`` calls in other threads wait, so that the memory of a model's passes is that of one call.

    Example:
        >>> def brightness(images, prompts, rows):
        ...     return images.mean((1, 2, 3)) / 255
        >>> video = np.zeros((1, 8, 4, 4, 3), np.uint8)
        >>> video[:, 4:] = 255
        >>> scores, parts = FrameReward(brightness, num_frames=2)(video, ["a sunrise"], [{}])
        >>> scores
        array([0.5])
    """

    def __init__(
        self, reward: ImageRewardFunction, *, num_frames: int, one_at_a_time: bool = False
    ) -> None:
        require("num_frames", num_frames, num_frames >= 1, "at least 1")
        self._reward = reward
        self._num_frames = num_frames
        self._turn = threading.Lock() if one_at_a_time else nullcontext()
        self.__name__ = name_of(reward)
        self.uses_engine: bool = getattr(reward, "uses_engine", False)

    def check(self, height: int, width: int) -> None:
        """Raise `RewardConfigError` for images of a size that the reward cannot score."""
        check_images([self._reward], height, width)

    def check_prompts(self, prompts: Sequence[str], rows: Rows) -> None:
        """Raise `RewardConfigError` for prompts that the reward cannot score."""
        check_prompts([self._reward], prompts, rows)

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[str], rows: Rows) -> Any:
        """Return scores [B] of images [B, H, W, 3] or videos [B, F, H, W, 3], or a coroutine of them."""
        if images.ndim == 4:
            with self._turn:
                return self._reward(images, prompts, rows)
        count = min(self._num_frames, images.shape[1])
        middles = [(2 * part + 1) * images.shape[1] // (2 * count) for part in range(count)]
        frames = images[:, middles].reshape(-1, *images.shape[2:])
        frame_prompts: list[str] = []
        for prompt in prompts:
            frame_prompts += [prompt] * count
        frame_rows: list[Mapping[str, Any]] = []
        for row in rows:
            frame_rows += [row] * count
        with self._turn:
            values = self._reward(frames, frame_prompts, frame_rows)
        if inspect.isawaitable(values):
            return self._await_means(values, len(images), count)
        return _means(values, len(images), count)

    async def _await_means(self, values: Awaitable[Any], num_videos: int, count: int) -> Any:
        return _means(await values, num_videos, count)


def _means(values: Any, num_videos: int, count: int) -> tuple[Scores, dict[str, Scores]]:
    """Return means over the ``count`` frames of each video of scores and of the numbers that come with them."""
    scores, parts = _read(values, num_videos * count, "frames")
    means = {name: np.reshape(part, (num_videos, count)).mean(1) for name, part in parts.items()}
    return np.reshape(scores, (num_videos, count)).mean(1), means


def _read(values: Any, count: int, unit: str) -> tuple[list[float], dict[str, list[float]]]:
    """Return the scores that a reward returned, and the numbers that came with them."""
    extra: Mapping[str, Any] = {}
    if isinstance(values, tuple) and len(values) == 2 and isinstance(values[1], Mapping):
        values, extra = values
    scores: list[float] = np.asarray(_detach(values), dtype=np.float64).reshape(-1).tolist()
    if len(scores) != count:
        raise RewardError(f"returned {len(scores)} scores; expected one for each of {count} {unit}")
    return scores, _parts(extra, count)


def _detach(values: Any) -> Any:
    """Return values with torch's tensors as arrays: NumPy reads none with a gradient, in bfloat16 or on a GPU."""
    if isinstance(values, list | tuple):
        return list(map(_detach, values))
    if hasattr(values, "detach"):
        return values.detach().cpu().double().numpy()
    return values


def _parts(extra: Mapping[str, Any], num_images: int) -> dict[str, list[float]]:
    """Return the values that are a finite number for each image, or one for all, by name."""
    parts: dict[str, list[float]] = {}
    for name, value in extra.items():
        try:
            numbers = np.asarray(_detach(value), dtype=np.float64).reshape(-1)
        except (TypeError, ValueError):
            # A text, or lists of several lengths.
            continue
        if len(numbers) in (1, num_images) and np.isfinite(numbers).all():
            parts[str(name)] = np.broadcast_to(numbers, num_images).tolist()
    return parts


def import_pillow(module: str = "Image") -> Any:
    """Import a module of Pillow; raise `RolloutError` if it is not installed."""
    try:
        return import_module(f"PIL.{module}")
    except ImportError:
        raise make_extra_error("PIL", "images") from None


def png(image: Any) -> bytes:
    """Encode an image [H, W, 3] of uint8 as a PNG file."""
    file = io.BytesIO()
    import_pillow().fromarray(image).save(file, format="PNG")
    return file.getvalue()


def make_jpeg_reward(*, sign: int = -1, size: int = 0) -> ScoreImages:
    """Return DDPO's rewards (arXiv 2305.13301, section 5.1): kilobytes of a JPEG of quality 95, or minus these.

    A kilobyte is 1,000 bytes. With ``sign`` -1 small files are good (compressibility), with 1 large ones
    (incompressibility). A side is resized to ``size`` pixels before; 0: it stays. The file of a very small image is
    mostly header.
    """
    pillow = import_pillow()
    require("sign", sign, sign in (-1, 1), "-1 or 1")
    require("size", size, size >= 0, "0 or more")

    def jpeg_kilobytes(images: Images, prompts: Sequence[str], rows: Rows) -> Scores:
        """Return scores [B]."""
        del prompts, rows
        scores: list[float] = []
        for image in images:
            picture = pillow.fromarray(image)
            if size:
                picture = picture.resize((size, size), pillow.Resampling.BICUBIC)
            file = io.BytesIO()
            picture.save(file, format="JPEG", quality=_QUALITY)
            scores.append(sign * len(file.getvalue()) / 1000)
        return np.array(scores)

    return jpeg_kilobytes


def make_colour_reward(colours: Mapping[str, tuple[float, float, float]]) -> ScoreImages:
    """Return a reward of the cosine of the prompt's colour and the image's mean colour, weighted by brightness.

    It is from 0 to 1. ``colours`` has red, green and blue from 0 to 1 by the word of a prompt that names them.

    Example:
        >>> reward = make_colour_reward({"red": (1, 0, 0), "yellow": (1, 1, 0)})
        >>> image = np.zeros((8, 8, 3), np.uint8)
        >>> image[..., 0] = 255
        >>> reward(np.stack([image, image]), ["a red car", "a yellow car"], [{}, {}]).round(3)
        array([1.   , 0.707])
    """
    if not colours:
        raise RewardConfigError("colours is empty; expected at least one")
    units: dict[str, NDArray[np.float64]] = {}
    for word, colour in colours.items():
        if len(colour) != 3 or not all(0 <= part <= 1 for part in colour) or not any(colour):
            expected = "three numbers from 0 to 1, one above 0"
            raise RewardConfigError(f"colours has {word!r}: {colour}; expected {expected}")
        units[word] = np.asarray(colour, np.float64) / np.linalg.norm(colour)

    def colour_similarity(images: Images, prompts: Sequence[str], rows: Rows) -> Scores:
        """Return scores [B]; `RewardConfigError` if a prompt names no known colour."""
        del rows
        requested: list[NDArray[np.float64]] = []
        for prompt in prompts:
            words = [word for word in prompt.split() if word in units]
            if not words:
                raise RewardConfigError(
                    f"prompt {prompt!r} names no colour; expected one of {', '.join(units)}"
                )
            requested.append(units[words[0]])
        # Pixels are weighted by their brightest channel.
        pixels = images.astype(np.float64) / 255
        means = (pixels * pixels.max(-1, keepdims=True)).sum((1, 2))
        directions = means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
        return (directions * np.stack(requested)).sum(1)

    return colour_similarity
