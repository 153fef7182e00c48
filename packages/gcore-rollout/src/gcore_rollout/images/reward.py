"""What a reward of images is, and the one place where it is called."""

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.errors import RewardError, RewardExitError
from gcore_rollout.rewards.reward import name_of
from gcore_rollout.rewards.threads import DaemonThreads

Images = NDArray[np.uint8]
"""[B, H, W, 3]."""

ImageRewardFunction = Callable[[Images, Sequence[str], Sequence[Mapping[str, Any]]], Any | Awaitable[Any]]
"""``reward(images, prompts, rows)``: B scores. May be async."""


class ImageReward(Protocol):
    """A reward that may refuse images at the start of a run."""

    def check(self, height: int, width: int) -> None:
        """
        Raises:
            RewardConfigError: images of this size have no score.
        """
        ...

    def __call__(self, images: Images, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]], /) -> Any:
        """B scores; see `ImageRewardFunction`."""
        ...


async def evaluate_images(
    reward: ImageRewardFunction, images: Images, prompts: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> list[float]:
    """Call a reward, in a thread unless it is async, and check what it returns.

    Raises:
        RewardError: it raised, or did not return as many finite numbers as there are images.
    """
    try:
        if inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(getattr(reward, "__call__", None)):  # noqa: B004 - an object whose call is async
            values = await reward(images, prompts, rows)
        else:
            # A thread of its own: one of asyncio would keep the process from ending while the reward blocks.
            threads = DaemonThreads(1, name=f"reward-{name_of(reward)}")
            try:
                values = await threads.run(reward, images, prompts, rows)
            finally:
                threads.close()
            if inspect.isawaitable(values):
                values = await values
        scores = [float(value) for value in np.asarray(values, dtype=np.float64).reshape(-1)]
    except SystemExit as error:
        raise RewardExitError(f"reward {name_of(reward)!r} tried to end the process: {error!r}") from error
    except Exception as error:
        reason = str(error) if isinstance(error, RewardError) else f"{type(error).__name__}: {error}"
        raise RewardError(f"reward {name_of(reward)!r} on {len(images)} images: {reason}") from error
    if len(scores) != len(images):
        raise RewardError(
            f"reward {name_of(reward)!r} returned {len(scores)} scores of {len(images)} images: one of each is needed"
        )
    for score, prompt in zip(scores, prompts, strict=True):
        if not math.isfinite(score):
            raise RewardError(
                f"reward {name_of(reward)!r} returned {score} for an image of {prompt!r}; expected a finite number"
            )
    return scores
