"""GRPO steps under gcore and under TRL or verl, on the same workloads."""
