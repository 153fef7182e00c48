"""Prompts of data sets that are too large for memory, and of tasks."""
