"""Benchmark of GRPO steps under gcore, TRL and verl on the same workloads."""
