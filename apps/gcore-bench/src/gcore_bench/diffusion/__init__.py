"""Benchmark of gcore-diffusion against a plain loop on diffusers, and its placement on a simulated cluster."""
