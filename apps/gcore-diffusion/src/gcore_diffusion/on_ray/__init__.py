"""A run of gcore-diffusion on a Ray cluster: what its actors make and compute."""
