"""Benchmark of generation, weight updates and sandboxes of gcore-rollout against bare vLLM, transformers and Python."""
