"""GRPO steps under gcore and under TRL, on the same workloads."""
