"""Simulated services of a run: engines, a reward and a trainer in simulated time, and their fit to measured runs."""
