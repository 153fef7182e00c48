"""Settings of engines, rewards, rollouts and the trainer."""
