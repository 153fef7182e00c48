"""The part planner: what gcore-placement foretells of small runs on this machine, and what they take."""
