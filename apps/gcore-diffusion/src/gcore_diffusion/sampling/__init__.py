"""Generation and rewarding: engines, groups of images, rewards, evaluation."""
