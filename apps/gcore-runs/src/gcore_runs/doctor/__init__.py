"""Checks of machines before a run: what they have, what is wrong with it, and what to do."""
