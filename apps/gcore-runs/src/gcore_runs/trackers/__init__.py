"""Trackers, which show a run's metrics and images elsewhere than in its folder."""
