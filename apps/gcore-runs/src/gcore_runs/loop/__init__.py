"""A run from its first step to its last: jobs, recorders, recovery, interrupts."""
