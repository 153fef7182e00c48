"""Simulate placement strategies on traces."""
