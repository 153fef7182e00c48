"""Engines in actors of a Ray cluster."""
