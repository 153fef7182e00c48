"""Checkpoints in several places: on the machines of a job, with copies of each other's files, and in shared places."""
