"""gcore-diffusion beside a plain loop on diffusers, and its placement on a simulated cluster."""
