"""Strategies of placement, simulated on traces."""
