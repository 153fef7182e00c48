"""Weighted sums of rewards of images, how they are written, and rewards of videos by frames."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gcore_rollout import (
    FrameReward,
    ImageCompositeReward,
    ImageRewardKind,
    ImageRewardSettings,
    RewardConfigError,
    RewardError,
    Scored,
    build_image_reward,
    evaluate_images,
    register_image_reward,
    reward_terms,
)

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 4, 4, 3)).astype(np.uint8)
PROMPTS = ["a", "b", "c"]
ROWS: list[dict[str, Any]] = [{}] * 3


def red(images: Any, prompts: Any, rows: Any) -> Any:
    return images[..., 0].mean((1, 2)), {"bright": images.mean((1, 2, 3)), "constant": 2.0}


async def ones(images: Any, prompts: Any, rows: Any) -> Sequence[float]:
    await asyncio.sleep(0)
    return [1.0] * len(images)


async def test_scores_are_the_weighted_sum_and_terms_are_parts() -> None:
    reward = ImageCompositeReward({"red": red, "one": ones}, weights={"red": 0.5, "one": -2.0})
    found = await evaluate_images(reward, IMAGES, PROMPTS, ROWS)
    reds = IMAGES[..., 0].mean((1, 2))
    assert [one.score for one in found] == pytest.approx(0.5 * reds - 2)
    assert [one.parts["red"] for one in found] == pytest.approx(reds)
    assert [one.parts["red/bright"] for one in found] == pytest.approx(IMAGES.mean((1, 2, 3)))
    assert {(one.parts["one"], one.parts["red/constant"]) for one in found} == {(1.0, 2.0)}


async def test_errors_of_terms() -> None:
    def broken(images: Any, prompts: Any, rows: Any) -> Any:
        raise OSError("no disk")

    class Sized:
        def check(self, height: int, width: int) -> None:
            raise RewardConfigError(f"{height} x {width}")

        def __call__(self, images: Any, prompts: Any, rows: Any) -> Any:
            del prompts, rows
            return [0.0] * len(images)

    weights = {"one": 1.0, "other": 1.0}
    with pytest.raises(RewardError, match="'broken' on 3 images: OSError: no disk"):
        await evaluate_images(
            ImageCompositeReward({"one": ones, "other": broken}, weights=weights),
            IMAGES,
            "abc",
            ROWS,
        )
    with pytest.raises(RewardConfigError, match="8 x 9"):
        ImageCompositeReward({"one": ones, "other": Sized()}, weights=weights).check(8, 9)
    with pytest.raises(RewardConfigError, match="weights has"):
        ImageCompositeReward({"one": ones}, weights=weights)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("clip", {"clip": 1.0}),
        ("0.8 * pick_score + 0.2 * ocr", {"pick_score": 0.8, "ocr": 0.2}),
        ("0.8*pick_score+.2*ocr", {"pick_score": 0.8, "ocr": 0.2}),
        ("-1e-2 * a + c++/b.py:f", {"a": -0.01, "c++/b.py:f": 1.0}),
        ("http://host:80/a+b*c", {"http://host:80/a+b*c": 1.0}),
    ],
)
def test_sums_are_read(text: str, expected: dict[str, float]) -> None:
    assert reward_terms(text, setting="reward.kind") == expected


@pytest.mark.parametrize("text", ["", "a + a", "0 * a + 0*b"])
def test_what_is_no_sum(text: str) -> None:
    with pytest.raises(RewardConfigError, match=r"reward\.kind is .*; expected"):
        reward_terms(text, setting="reward.kind")


VIDEOS = np.random.default_rng(1).integers(0, 256, (3, 9, 4, 4, 3)).astype(np.uint8)


@pytest.mark.parametrize(
    ("num_frames", "places"), [(1, [4]), (3, [1, 4, 7]), (4, [1, 3, 5, 7]), (20, list(range(9)))]
)
async def test_videos_are_scored_by_frames(num_frames: int, places: list[int]) -> None:
    """The mean of scores, and of the numbers that come with them."""
    [*found] = await evaluate_images(FrameReward(red, num_frames=num_frames), VIDEOS, PROMPTS, ROWS)
    frames = VIDEOS[:, places]
    assert [one.score for one in found] == pytest.approx(frames[..., 0].mean((1, 2, 3)))
    assert [one.parts["bright"] for one in found] == pytest.approx(frames.mean((1, 2, 3, 4)))
    assert {one.parts["constant"] for one in found} == {2.0}


async def test_frames_have_their_videos_prompts_and_rows() -> None:
    async def place(images: Any, prompts: Any, rows: Any) -> Any:
        assert images.shape == (6, 4, 4, 3)
        return [
            10 * "abc".index(prompt) + row["row"] for prompt, row in zip(prompts, rows, strict=True)
        ]

    rows = [{"row": i} for i in range(3)]
    found = await evaluate_images(FrameReward(place, num_frames=2), VIDEOS, PROMPTS, rows)
    assert [one.score for one in found] == [0.0, 11.0, 22.0]


async def test_images_are_scored_as_before_and_registered_rewards_take_videos() -> None:
    assert (
        await evaluate_images(FrameReward(ones, num_frames=2), IMAGES, PROMPTS, ROWS)
        == [Scored(score=1.0)] * 3
    )
    settings = ImageRewardSettings(num_frames=9)
    reward = build_image_reward("jpeg_incompressibility", settings, setting="reward.kind")
    alone = [
        (await evaluate_images(reward, VIDEOS[:, i], PROMPTS, ROWS))[0].score for i in range(9)
    ]
    assert (await evaluate_images(reward, VIDEOS, PROMPTS, ROWS))[0].score == pytest.approx(
        np.mean(alone)
    )


async def test_frames_without_scores() -> None:
    def few(images: Any, prompts: Any, rows: Any) -> list[float]:
        return [1.0] * 3

    with pytest.raises(
        RewardError, match="'few' on 3 images: returned 3 scores; expected one for each of 6 frames"
    ):
        await evaluate_images(FrameReward(few, num_frames=2), VIDEOS, PROMPTS, ROWS)


@pytest.mark.parametrize("is_model", [True, False])
async def test_a_model_scores_one_call_at_a_time(is_model: bool) -> None:
    running, most = 0, list[int]()

    def slow(images: Any, prompts: Any, rows: Any) -> list[float]:
        nonlocal running
        running += 1
        most.append(running)
        time.sleep(0.05)
        running -= 1
        return [0.0] * len(images)

    kind = ImageRewardKind(make=lambda _: slow, is_model=is_model)
    register_image_reward(f"slow-{is_model}", kind)
    reward = build_image_reward(f"slow-{is_model}", ImageRewardSettings(), setting="reward.kind")
    await asyncio.gather(
        *(evaluate_images(reward, pixels, PROMPTS, ROWS) for pixels in (IMAGES, VIDEOS, IMAGES))
    )
    assert (max(most) == 1) == is_model
