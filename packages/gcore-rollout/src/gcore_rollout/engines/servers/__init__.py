"""Engines whose servers run elsewhere."""
