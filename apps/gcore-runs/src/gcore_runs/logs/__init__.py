"""Logs of a run's processes: one file for each, merged by time."""
