"""Rewards of completions: how they are called, and their kinds."""
