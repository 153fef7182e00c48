"""Settings of a command: read, checked, merged, and those that all runs share."""
