"""What the processes of a run log: written to a file each, and merged by time."""
