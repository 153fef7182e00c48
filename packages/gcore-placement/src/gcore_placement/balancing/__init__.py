"""Divide items evenly among parts: ranks, and micro-batches."""
