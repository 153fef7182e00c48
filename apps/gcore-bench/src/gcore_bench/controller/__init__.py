"""Benchmark of gcore-controller against verl's single driver, and its load in simulated clusters."""
