"""Generation and rewarding: engines, groups of responses, rewards, evaluation."""
