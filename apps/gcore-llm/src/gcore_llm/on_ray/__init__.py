"""A run of gcore-llm on a Ray cluster: what its actors make and compute."""
