"""The part planner: predictions of small runs on this machine, compared with measurements."""
