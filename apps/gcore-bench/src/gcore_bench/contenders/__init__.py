"""Contenders that are more than a function of their bench: servers, and libraries of checkpoints."""
