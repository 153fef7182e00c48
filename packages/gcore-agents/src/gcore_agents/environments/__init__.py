"""Agents that are Python classes: an environment answers each turn of the policy."""
