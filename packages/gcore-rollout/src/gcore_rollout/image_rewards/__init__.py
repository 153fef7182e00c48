"""Rewards of images: a protocol, and those that need no network."""

from gcore_rollout.image_rewards.colour import ColourReward
from gcore_rollout.image_rewards.jpeg import JPEGCompressibility
from gcore_rollout.image_rewards.reward import ImageReward, ImageRewardFunction, evaluate_images

__all__ = ["ColourReward", "ImageReward", "ImageRewardFunction", "JPEGCompressibility", "evaluate_images"]
