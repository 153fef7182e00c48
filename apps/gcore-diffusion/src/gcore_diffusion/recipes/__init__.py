"""Recipes of large models, which `gcore-diffusion train --recipe NAME` starts from, and the shapes of their models."""
