"""Benchmark of gcore-trainer against TRL's and verl's losses and against plain implementations of its parts."""
