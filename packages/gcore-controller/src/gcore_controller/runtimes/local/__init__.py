"""Training ranks in local processes."""
