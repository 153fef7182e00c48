"""Losses of policies, a file for each."""
